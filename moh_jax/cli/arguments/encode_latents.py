"""Options of `python -m moh_jax encode-latents`."""

import argparse

from moh_jax.cli import common
from moh_jax.config.checks import DTYPES
from moh_jax.config.sections import BAD_IMAGES

# Option -> its text and the default of `inference.latent_set.EncodeOptions`.
NUMBERS = {
  "image-size": ("sides of the centre crop in pixels", 256),
  "batch-size": ("images encoded at a time, per process", 32),
  "shard-size": ("images per shard", 1024),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_image_folders(parser, "; or what `pack-images` made of it")
  parser.add_argument(
    "--vae", required=True, metavar="PATH", help="weights of the autoencoder"
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  for name, (text, default) in NUMBERS.items():
    parser.add_argument(
      f"--{name}",
      type=int,
      default=argparse.SUPPRESS,
      metavar="N",
      help=f"{text} (default: {default})",
    )
  parser.add_argument(
    "--latent-scale",
    type=float,
    default=argparse.SUPPRESS,
    metavar="S",
    help="factor that training will apply to the latents (default: that of "
    "Stable Diffusion's autoencoder)",
  )
  parser.add_argument(
    "--bad-images",
    choices=BAD_IMAGES,
    default=argparse.SUPPRESS,
    help="what an image does that cannot be read or is too small (default: "
    "raise)",
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default="float32", help="of the computation"
  )
  parser.add_argument(
    "--process",
    type=_part,
    default=(None, None),
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
