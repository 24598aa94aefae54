"""`python -m moh_jax COMMAND`."""

import sys

from moh_jax.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
