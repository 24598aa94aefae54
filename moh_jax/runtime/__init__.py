"""Device mesh, parameters and checkpoint files of training and inference."""
