"""Options of `python -m moh_jax pack-images`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_image_folders(parser)
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--shard-size", type=int, default=1024, metavar="N", help="images per shard"
  )
