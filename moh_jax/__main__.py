"""`python -m moh_jax COMMAND`."""

import sys

if __name__ == "__main__":
  try:
    from moh_jax.cli.main import run_process
  except ModuleNotFoundError as error:  # the entry point itself needs libraries
    print(f"error: {error}; pip install 'moh_jax[train]'", file=sys.stderr)
    sys.exit(2)
  run_process()
