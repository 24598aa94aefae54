"""Options of `python -m moh_jax fid`."""

import argparse

from moh_jax.cli import common
from moh_jax.config.checks import RESIZES
from moh_jax.convert.downloads import HOW_TO_GET_INCEPTION

METRICS = ("fid", "sfid", "is", "pr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  kinds = "npz file with arr_0 (uint8 [images, X, Y, 3]) or folder of images"
  parser.add_argument(
    "--samples", required=True, metavar="PATH", help=f"to be scored: {kinds}"
  )
  parser.add_argument(
    "--reference",
    metavar="PATH",
    help=f"to score against: {kinds}, or an npz file with statistics (mu, "
    "sigma, mu_s, sigma_s), which then serve FID and sFID",
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
