"""`python -m moh_jax COMMAND`."""

from moh_jax.cli.main import run_process

if __name__ == "__main__":
  run_process()
