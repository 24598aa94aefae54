"""Options of `python -m moh_jax sample`."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import SampleConfig
from moh_jax.convert.downloads import HOW_TO_GET_VAE

# Fields of the section `sample` that a command may state.
OVERRIDES = ("method", "steps", "cfg_scale", "cfg_channels", "cfg_interval")


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
    type=fields.int_tuple,
    default=(),
    metavar="L,L,...",
    help="labels of the images in turn (default: every class)",
  )
  text = "images (default: one for each of the labels)"
  common.add_count(parser, "--num", help=text)
  parser.add_argument("--seed", type=int, default=0)
  fields.add_fields(parser, SampleConfig, *OVERRIDES, defaults="the run's")
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
  common.add_count(parser, "--batch-size", 64)
  common.add_count(parser, "--columns", help="of the grid")
  text = "enlarge the grid's pixels so often"
  common.add_count(parser, "--zoom", 1, help=text)
