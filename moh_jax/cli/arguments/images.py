"""Options of the commands that read or write images."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import SampleConfig
from moh_jax.config.base import DTYPES
from moh_jax.config.dit import RESIZES, EncodeOptions
from moh_jax.convert import HOW_TO_GET_INCEPTION, HOW_TO_GET_VAE

METRICS = ("fid", "sfid", "is", "pr")
# Fields of the section `sample` that a command may state.
OVERRIDES = (
  *("method", "steps", "eta"),
  *("cfg_scale", "cfg_channels", "cfg_interval"),
)


def encode_latents(parser: argparse.ArgumentParser) -> None:
  """Turn images into latents to train a diffusion model on."""
  common.add_image_folders(
    parser, "; or what `pack-images` made of it, or Parquet or Arrow files"
  )
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


def pack_images(parser: argparse.ArgumentParser) -> None:
  """Pack images, in folders or tables, into array_record shards."""
  common.add_image_folders(parser, "; or Parquet or Arrow files of images")
  parser.add_argument("--out", required=True, metavar="DIR")
  common.add_count(
    parser, "--shard-size", 1024, metavar="N", help="images per shard"
  )
  common.add_count(
    parser,
    "--shorter-side",
    0,
    metavar="N",
    help="make images whose shorter side has more than N pixels smaller, as "
    "JPEG (default: copy all files unchanged)",
  )
  parser.add_argument(
    "--class-list",
    metavar="FILE",
    help="labels in the order of FILE, which names a class (a folder) on each "
    "line (default: alphabetical)",
  )
  parser.add_argument(
    "--bad-images",
    choices=("raise", "skip"),
    default="raise",
    help="end at a file that cannot be read, or leave it out",
  )


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
