"""Analysis of the heads of trained models."""
