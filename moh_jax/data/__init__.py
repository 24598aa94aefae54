"""Data: sources of examples, their files, and pipelines that make batches."""
