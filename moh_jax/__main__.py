"""`python -m moh_jax COMMAND`, and the script `moh_jax`."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs a command as the whole of this process; None takes its arguments."""
  try:
    from moh_jax.cli.main import run_process

    run_process(argv)
  except ModuleNotFoundError as error:  # the entry point itself needs libraries
    if (error.name or "").startswith("moh_jax"):
      raise
    print(
      f"error: {error}; pip install '.[train]' in the clone", file=sys.stderr
    )
    sys.exit(2)
  except KeyboardInterrupt:  # before signals are handled
    print("error: stopped by SIGINT", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  main()
