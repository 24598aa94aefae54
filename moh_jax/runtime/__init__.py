"""Device mesh, parameters and checkpoint files, below training and inference."""
