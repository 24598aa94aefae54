"""Options of `python -m moh_jax inspect`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--checkpoint", metavar="DIR", help=common.CHECKPOINT_HELP)
  common.add_config(what)
  common.add_step(parser)
  common.add_json(parser)
  parser.epilog = (
    "The column `attention` is the form that a layer has in training, for one "
    "example on one device."
  )
