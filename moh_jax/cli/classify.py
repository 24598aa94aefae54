"""`python -m moh_jax classify`."""

import argparse
import dataclasses
import sys

from moh_jax.cli import common
from moh_jax.data.images.files import read_image


def run(args: argparse.Namespace) -> int:
  """Prints the most probable classes of each image."""
  metadata, _ = common.read_metadata(args, "classify")
  for file in args.images:  # before the parameters, which take a while
    read_image(file, metadata.config.model.channels)
  restored = common.restore(args)
  predictions = restored.predict(
    args.images, top=args.top, batch_size=args.batch_size
  )
  for file, best in zip(args.images, predictions):
    line = ", ".join(f"{p.name} {p.probability:.1%}" for p in best)
    stream = sys.stderr if args.json == "-" else sys.stdout
    print(f"{file}: {line}", file=stream)
  rows = [
    {"image": file, "predictions": [dataclasses.asdict(p) for p in best]}
    for file, best in zip(args.images, predictions)
  ]
  common.write_json(args.json, rows)
  return 0
