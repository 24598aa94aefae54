"""Options of `python -m moh_jax sample`."""

import argparse

from moh_jax.cli import common
from moh_jax.config.diffusion import GUIDED_CHANNELS, METHODS
from moh_jax.convert.downloads import HOW_TO_GET_VAE


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--out",
    required=True,
    metavar="FILE",
    help=".png: one grid of all images; .npz: arr_0 uint8 [N, X, Y, channels] "
    "and labels arr_1, written in parts that survive a kill",
  )
  parser.add_argument(
    "--labels",
    type=common.int_tuple,
    default=(),
    metavar="L,L,...",
    help="labels of the images in turn (default: every class)",
  )
  parser.add_argument(
    "--num", type=int, help="images (default: one for each of the labels)"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--method", choices=METHODS)
  parser.add_argument(
    "--steps", metavar="N", help="N, ddimN, or N,M,... for equal sections"
  )
  parser.add_argument("--cfg-scale", type=float, help="guidance; 1 is none")
  parser.add_argument("--cfg-channels", choices=GUIDED_CHANNELS)
  parser.add_argument(
    "--cfg-interval",
    type=common.int_tuple,
    metavar="LOW,HIGH",
    help="guide timesteps LOW <= t < HIGH only",
  )
  parser.add_argument(
    "--vae", metavar="PATH", help=f"autoencoder of latents: {HOW_TO_GET_VAE}"
  )
  parser.add_argument(
    "--vae-tile",
    type=int,
    default=0,
    metavar="N",
    help="decode in overlapping squares of N latent pixels, to bound memory",
  )
  parser.add_argument("--batch-size", type=int, default=64)
  parser.add_argument("--columns", type=int, help="of the grid")
  parser.add_argument(
    "--zoom", type=int, default=1, help="enlarge the grid's pixels so often"
  )
