"""From a config and batches to checkpoints, one job a file."""
