"""Device mesh, parameters and checkpoint files, for training and inference."""
