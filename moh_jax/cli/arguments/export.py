"""Options of `python -m moh_jax export`."""

import argparse

from moh_jax.cli import common
from moh_jax.convert.tensor_writer import DTYPES, SHARD_SIZE

_UNITS = {"GB": 10**9, "MB": 10**6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_weights(parser)
  parser.add_argument(
    "--out",
    required=True,
    metavar="PATH",
    help="safetensors file to write; for a language model a folder that "
    "transformers loads, new or empty",
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default="float32", help="of the stored weights"
  )
  parser.add_argument(
    "--shard-size",
    type=_bytes,
    default=SHARD_SIZE,
    metavar="SIZE",
    help="largest file of a language model, as 5GB or 500MB (default: 5GB)",
  )


def _bytes(text: str) -> int:
  """Parses "5GB"."""
  number, unit = text[:-2], text[-2:].upper()
  if unit not in _UNITS or not number.isdigit() or not int(number):
    raise argparse.ArgumentTypeError(
      f"{text!r} must be a whole number and one of {', '.join(_UNITS)}"
    )
  return int(number) * _UNITS[unit]
