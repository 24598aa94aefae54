"""Options of the commands that read or write images."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import SampleConfig
from moh_jax.config.dit import RESIZES
from moh_jax.convert import HOW_TO_GET_INCEPTION, HOW_TO_GET_VAE

METRICS = ("fid", "sfid", "is", "pr")
# Fields of the section `sample` that a command may state.
OVERRIDES = (
  *("method", "steps", "eta"),
  *("cfg_scale", "cfg_channels", "cfg_interval"),
)


def fid(parser: argparse.ArgumentParser) -> None:
  """Score images: FID, sFID, Inception Score, precision, recall."""
  kinds = "npz file with arr_0 (uint8 [N, X, Y, 3 or 1]) or folder of images"
  parser.add_argument(
    "--samples", required=True, metavar="PATH", help=f"to be scored: {kinds}"
  )
  parser.add_argument(
    "--reference",
    metavar="PATH",
    help=f"to score against: {kinds}, or an npz file with statistics (mu, "
    "sigma, mu_s, sigma_s), which then serve FID and sFID; of pytorch-fid (mu, "
    "sigma), FID",
  )
  parser.add_argument("--inception", metavar="PATH", help=HOW_TO_GET_INCEPTION)
  parser.add_argument(
    "--metrics",
    type=_metrics,
    metavar="NAME,...",
    help=f"of {','.join(METRICS)} (default: all that the files allow)",
  )
  parser.add_argument(
    "--resize",
    choices=RESIZES,
    default="tf1",
    help="to 299 pixels: as ADM and DiT's numbers, or as pytorch-fid",
  )
  common.add_count(
    parser,
    "--image-size",
    metavar="N",
    help="crop the images of folders to N x N pixels, as in training of "
    "diffusion models (default: all must have one size)",
  )
  common.add_count(parser, "--batch-size", 64, help="images per batch")
  parser.add_argument(
    "--save-stats",
    metavar="FILE",
    help="write the statistics of the samples as a reference file",
  )
  common.add_json(parser)


def _metrics(text: str) -> tuple[str, ...]:
  names = tuple(text.split(","))
  if unknown := [name for name in names if name not in METRICS]:
    raise argparse.ArgumentTypeError(
      f"{unknown[0]!r} must be one of {', '.join(METRICS)}"
    )
  return names


def sample(parser: argparse.ArgumentParser) -> None:
  """Sample images from a diffusion checkpoint."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--out",
    required=True,
    metavar="PATH",
    help=".png: one grid of all images; .npz: arr_0 uint8 [N, X, Y, channels] "
    "and labels arr_1, in parts that survive a kill; no suffix: a folder of "
    "files CLASS/NUMBER.png",
  )
  parser.add_argument(
    "--labels",
    default="",
    metavar="L,L,...",
    help="classes of the images in turn: names, numbers (from 0, in "
    "alphabetical order of the folders) or none (default: every class)",
  )
  text = "images (default: one for each of the labels)"
  common.add_count(parser, "--num", help=text)
  parser.add_argument("--seed", type=fields.integer, default=0)
  fields.add_fields(parser, SampleConfig, *OVERRIDES, defaults="the run's")
  parser.add_argument(
    "--vae", metavar="PATH", help=f"autoencoder of latents: {HOW_TO_GET_VAE}"
  )
  parser.add_argument(
    "--vae-tile",
    type=fields.integer,
    default=0,
    metavar="N",
    help="decode in overlapping squares of N latent pixels, to bound memory",
  )
  parser.add_argument(
    "--start",
    nargs="+",
    default=(),
    metavar="IMAGE",
    help="begin from these images in turn in place of noise: files, or folders "
    "with all below; they are cropped to the model's size",
  )
  parser.add_argument(
    "--strength",
    type=float,
    default=1.0,
    help="part of the steps that is taken from --start on, above 0, below 1: "
    "the more, the less is left of the image",
  )
  common.add_count(parser, "--batch-size", 64, help="images at a time")
  common.add_count(parser, "--columns", help="of the grid")
  text = "enlarge the grid's pixels so often"
  common.add_count(parser, "--zoom", 1, help=text)
