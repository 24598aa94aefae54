"""Figures of merit on held-out data."""
