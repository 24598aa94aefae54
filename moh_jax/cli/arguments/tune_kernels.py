"""Options of `python -m moh_jax tune-kernels`."""

import argparse

from moh_jax.cli import fields
from moh_jax.speed.options import Workload

SHAPES = ("batch", "tokens", "heads", "active", "dtype", "causal", "rounds")


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
  fields.add_fields(parser, Workload, *SHAPES)
