"""Comparison of our outputs with recorded ones of the public releases."""
