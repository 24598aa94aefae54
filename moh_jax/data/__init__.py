"""Examples to batches: sources, transforms, pipelines."""
