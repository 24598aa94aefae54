"""The diffusion process as pure functions: tables, training, sampling."""
