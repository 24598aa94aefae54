"""Attention of the heads at work as one kernel per GPU and TPU (Pallas)."""
