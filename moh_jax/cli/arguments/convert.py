"""Options of `python -m moh_jax convert`."""

import argparse

from moh_jax.cli import common
from moh_jax.config import public_formats


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "--from",
    dest="format",
    required=True,
    choices=public_formats(),
    metavar="FORMAT",
    help=f"one of {', '.join(public_formats())}",
  )
  parser.add_argument(
    "--source",
    required=True,
    metavar="PATH",
    help="safetensors file or folder, or .pth/.pt; a folder of transformers "
    "says in its config.json which model it is, a file of `export` in its "
    "metadata",
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--key", help="entry of a .pth that holds the weights (default: found)"
  )
  which = parser.add_mutually_exclusive_group()
  which.add_argument(
    "--model",
    help="released model (default: the one that the source names, or the one "
    "whose shapes fit)",
  )
  common.add_config(which, help="config file of another model")
  parser.add_argument(
    "--image-size",
    type=int,
    help="input size of a classifier in pixels, instead of the model's; the "
    "relative coordinates keep the pre-training size",
  )
