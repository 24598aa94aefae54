"""Conversion of public checkpoints to ours and back."""
