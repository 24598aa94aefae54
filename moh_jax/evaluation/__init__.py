"""Metrics on held-out data, and what the heads of trained models do."""
