"""`python -m moh_jax pack-images`."""

import argparse
import pathlib

from moh_jax.data.image_shards import open_splits, pack_images
from moh_jax.data.sources import listed_classes


def run(args: argparse.Namespace) -> int:
  """Writes the shards; a second run continues the first."""
  names = listed_classes(args.class_list)
  sources = open_splits(
    args.data,
    args.split,
    class_names=names,
    label_column=args.label_column,
    val_share=args.val_share,
  )
  for split, source in sources.items():
    out = pathlib.Path(args.out) / split
    metadata = pack_images(
      source,
      out,
      packed_from=args.data,
      shard_size=args.shard_size,
      shorter_side=args.shorter_side,
      bad_images=args.bad_images,
    )
    text = (
      f"{split}: {metadata['examples']:,} images of "
      f"{len(metadata['class_names']):,} classes in {out}"
    )
    if metadata["skipped"]:
      text += f"; {metadata['skipped']:,} skipped, see {out}/skipped"
    print(text)
  return 0
