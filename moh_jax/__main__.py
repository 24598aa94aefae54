"""`python -m moh_jax COMMAND`, and the script `moh_jax`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
  """Runs a command as the whole of this process."""
  try:
    from moh_jax.cli.main import run_process
  except ModuleNotFoundError as error:  # the entry point itself needs libraries
    print(f"error: {error}; pip install 'moh_jax[train]'", file=sys.stderr)
    sys.exit(2)
  run_process()


if __name__ == "__main__":
  main()
