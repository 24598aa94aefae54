"""Options of `python -m moh_jax tune-kernels`."""

import argparse

# Of `speed.tiles`, which needs JAX: its dtypes, and the defaults of `Workload`.
DTYPES = ("bfloat16", "float16", "float32")
DEFAULTS = {
  "dtype": "bfloat16",
  "batch": 8,
  "tokens": 1024,
  "heads": 16,
  "active": 8,
  "rounds": 20,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "--out",
    required=True,
    metavar="FILE",
    help="JSON file to add to; MOH_JAX_BLOCK_SIZES=FILE makes the library use "
    "it",
  )
  parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
  parser.add_argument("--dtype", choices=DTYPES)
  parser.add_argument("--batch", type=int)
  parser.add_argument("--tokens", type=int)
  parser.add_argument("--heads", type=int)
  parser.add_argument("--active", type=int, help="heads of a token")
  parser.add_argument("--causal", action="store_true")
  parser.add_argument("--rounds", type=int, help="measured turns")
  parser.set_defaults(**DEFAULTS)
