"""Trained checkpoints in use."""
