"""Options of `python -m moh_jax train`, which are those of train.py."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_config(parser, required=True)
  parser.add_argument(
    "--workdir",
    required=True,
    metavar="DIR",
    help="directory of checkpoints and metrics, local or a bucket; run again "
    "with the same arguments, the command resumes from its last checkpoint",
  )
  parser.add_argument(
    "--vae",
    default="",
    metavar="PATH",
    help="autoencoder weights that show samples of latent diffusion",
  )
  common.add_distributed(parser)
  common.add_json(parser)
