"""Options of `python -m moh_jax heads`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--batches",
    type=int,
    default=8,
    metavar="N",
    help="batches of the run's training text to measure on",
  )
  parser.add_argument(
    "--batch-size", type=int, default=8, help="sequences per batch"
  )
  common.add_json(parser)
