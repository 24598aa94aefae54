"""The command line: `python -m moh_jax COMMAND`."""
