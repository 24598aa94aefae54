"""Options of `python -m moh_jax encode-latents`."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config.checks import DTYPES
from moh_jax.inference.options import EncodeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_image_folders(parser, "; or what `pack-images` made of it")
  parser.add_argument(
    "--vae", required=True, metavar="PATH", help="weights of the autoencoder"
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  fields.add_fields(
    parser,
    EncodeOptions,
    *("image_size", "batch_size", "shard_size", "latent_scale", "bad_images"),
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default="float32", help="of the computation"
  )
  parser.add_argument(
    "--process",
    type=_part,
    metavar="I/N",
    help="of N processes that write one set, this is number I, from 0; each "
    "takes every N-th shard",
  )


def _part(text: str) -> tuple[int, int]:
  """Parses "0/2"."""
  try:
    index, count = (int(number) for number in text.split("/"))
  except ValueError:
    index, count = 0, 0
  if not 0 <= index < count:
    raise argparse.ArgumentTypeError(
      f"{text!r} must be I/N with 0 <= I < N, for instance 0/2"
    )
  return index, count
