"""Attention of the active heads as Pallas kernels for GPUs and TPUs."""
