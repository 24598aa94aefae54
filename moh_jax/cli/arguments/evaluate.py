"""Options of `python -m moh_jax evaluate`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--data",
    metavar="DIR",
    help="directory of images, shards, latents or tokens, instead of the run's",
  )
  parser.add_argument(
    "--batch-size", type=int, help="examples per batch, instead of the run's"
  )
  parser.add_argument(
    "--examples",
    type=int,
    default=0,
    metavar="N",
    help="examples at most, spread evenly over the split (default: all)",
  )
  common.add_json(parser)
