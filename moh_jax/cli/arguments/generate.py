"""Options of `python -m moh_jax generate`."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import CACHE_DTYPES
from moh_jax.inference.options import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--prompt",
    action="append",
    required=True,
    metavar="TEXT",
    help="text to write on from; several times for several texts",
  )
  fields.add_fields(
    parser, Sampling, "max_new_tokens", "temperature", "top_p", "seed"
  )
  parser.add_argument(
    "--sample-top-k",
    type=int,
    default=0,
    metavar="N",
    help="sample from the N best tokens (--top-k is of the heads)",
  )
  parser.add_argument(
    "--stop", action="append", default=[], metavar="TEXT", help="ends a text"
  )
  parser.add_argument("--batch-size", type=int, default=8)
  parser.add_argument(
    "--cache-dtype", choices=CACHE_DTYPES, help="of keys and values"
  )
  common.add_json(parser)
