"""`python -m moh_jax pack-images`."""

import argparse
import pathlib

from moh_jax.data.images.folders import find_splits
from moh_jax.data.images.pack import pack_images


def run(args: argparse.Namespace) -> int:
  """Writes the shards; a second run continues the first."""
  for split, folder in find_splits(args.data, args.split).items():
    out = pathlib.Path(args.out) / split
    metadata = pack_images(folder, out, shard_size=args.shard_size)
    print(
      f"{split}: {metadata['examples']:,} images of "
      f"{len(metadata['class_names']):,} classes in {out}"
    )
  return 0
