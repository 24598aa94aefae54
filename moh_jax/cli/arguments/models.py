"""Options of the commands for models of every family."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import EvalConfig


def evaluate(parser: argparse.ArgumentParser) -> None:
  """Score a checkpoint on its held-out data."""
  common.add_checkpoint(parser, "; given several times, a row for each")
  parser.add_argument(
    "--head-top-p",
    type=float,
    metavar="P",
    help="every token selects its best routed heads until their scores add up "
    "to P, in place of a fixed number; activated_share is what they use",
  )
  common.add_mesh(parser)
  parser.add_argument(
    "--data",
    metavar="DIR",
    help="directory of images, shards, latents or tokens, instead of the "
    "run's; its val/, or all images of a folder without",
  )
  parser.add_argument(
    "--per-class",
    metavar="FILE",
    default="",
    help="write a CSV file with the scores of each class, and what it is taken "
    "for most often; the worst classes are printed",
  )
  parser.add_argument(
    "--labels",
    dest="labels_file",
    metavar="FILE",
    help="JSON file of the right classes: a list in the order of the file "
    "names (such as ReaL's), or entries by file name; an entry is a class or "
    "several",
  )
  parser.add_argument(
    "--plot",
    metavar="FILE",
    default="",
    help="draw the scores of several --top-k over the activated share and over "
    "time (.png or .svg)",
  )
  fields.add_fields(parser, EvalConfig, "batch_size", defaults="the run's")
  fields.add_fields(parser, EvalConfig, "examples", defaults="all")
  common.add_json(parser)
