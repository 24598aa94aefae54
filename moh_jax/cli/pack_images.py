"""`python -m moh_jax pack-images`."""

import argparse
import pathlib

from moh_jax.data.images.files import SPLITS, find_splits
from moh_jax.data.images.pack import pack_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "--images",
    required=True,
    metavar="DIR",
    help="folder with a folder of images per class, or with train/ and val/ "
    "that have those",
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--split",
    choices=SPLITS,
    help="pack this split alone; without train/ and val/, what the images are "
    "(default: train)",
  )
  parser.add_argument(
    "--shard-size", type=int, default=1024, metavar="N", help="images per shard"
  )


def run(args: argparse.Namespace) -> int:
  """Writes the shards; a second run continues the first."""
  for split, folder in find_splits(args.images, args.split).items():
    out = pathlib.Path(args.out) / split
    metadata = pack_images(folder, out, shard_size=args.shard_size)
    print(
      f"{split}: {metadata['examples']:,} images of "
      f"{len(metadata['class_names']):,} classes in {out}"
    )
  return 0
