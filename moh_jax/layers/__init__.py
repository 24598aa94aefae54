"""Linen modules shared by the model families."""
