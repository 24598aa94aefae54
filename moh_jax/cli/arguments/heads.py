"""Options of `python -m moh_jax heads`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  text = "batches of the run's training text to measure on"
  common.add_count(parser, "--batches", 8, metavar="N", help=text)
  common.add_count(parser, "--batch-size", 8, help="sequences per batch")
  common.add_json(parser)
