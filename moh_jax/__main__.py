"""`python -m moh_jax COMMAND`."""

from moh_jax.cli.main import leave, main

if __name__ == "__main__":
  leave(main())
