"""Measurements of single parts; each prints a table and can write JSON."""
