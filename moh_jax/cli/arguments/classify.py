"""Options of `python -m moh_jax classify`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("images", nargs="+", metavar="IMAGE")
  common.add_checkpoint(parser)
  parser.add_argument("--top", type=int, default=5, help="classes per image")
  common.add_count(parser, "--batch-size", 32, help="images at a time")
  common.add_json(parser)
