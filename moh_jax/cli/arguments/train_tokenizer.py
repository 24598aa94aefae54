"""Options of `python -m moh_jax train-tokenizer`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_texts(parser)
  parser.add_argument(
    "--vocab-size",
    required=True,
    type=int,
    metavar="N",
    help="entries, among them the 256 bytes, begin and end of text",
  )
  parser.add_argument(
    "--out", required=True, metavar="FILE", help="for instance tokenizer.json"
  )
