"""Public checkpoints to ours and back, and parity with recorded cases."""
