"""Options of `python -m moh_jax tokenize`."""

import argparse
import os

from moh_jax.cli import common
from moh_jax.data.text.tokenize import PIECE_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_texts(parser)
  parser.add_argument(
    "--tokenizer",
    required=True,
    metavar="FILE",
    help="a tokenizer.json, a SentencePiece .model, a folder with one of them, "
    "or 'bytes'",
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parts = parser.add_mutually_exclusive_group()
  parts.add_argument(
    "--held-out",
    type=float,
    default=0.005,
    metavar="SHARE",
    help="share of the documents in val/, chosen by a hash of file and line; "
    "the others are train/ (default: 0.005)",
  )
  parts.add_argument(
    "--split", metavar="NAME", help="put all documents into this split instead"
  )
  parser.add_argument(
    "--shard-bytes",
    type=int,
    default=PIECE_BYTES,
    metavar="N",
    help=f"input of a shard in bytes, about (default: {PIECE_BYTES})",
  )
  parser.add_argument(
    "--workers",
    type=int,
    default=os.cpu_count(),
    metavar="N",
    help="processes (default: one per core)",
  )
