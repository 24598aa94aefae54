"""`python -m moh_jax classify`."""

import argparse
import dataclasses
import sys

from moh_jax.cli import common
from moh_jax.cli.csv_file import write_csv
from moh_jax.data.decode import read_image
from moh_jax.data.image_folders import find_images


def run(args: argparse.Namespace) -> int:
  """Prints the most probable classes of each image."""
  metadata, _ = common.read_metadata(args, "classify")
  files = find_images(args.images)
  for file in files:  # before the parameters, which take a while
    read_image(file, metadata.config.model.channels)
  restored = common.restore(args)
  rows, stream = [], sys.stderr if args.json == "-" else sys.stdout
  for start in range(0, len(files), args.batch_size):
    part = files[start : start + args.batch_size]
    found = restored.predict(part, top=args.top, batch_size=args.batch_size)
    for file, best in zip(part, found):
      line = ", ".join(f"{p.name} {p.probability:.1%}" for p in best)
      print(f"{file}: {line}", file=stream)
      predictions = [dataclasses.asdict(p) for p in best]
      rows.append({"image": file, "predictions": predictions})
  common.write_json(args.json, rows)
  if args.csv:
    _write_csv(args.csv, rows)
  return 0


def _write_csv(file: str, rows: list[dict]) -> None:
  """A row per image: its classes, the most probable first."""
  places = range(1, 1 + max(len(row["predictions"]) for row in rows))
  columns = [(f"class_{i}", f"probability_{i}") for i in places]
  header = ["image", *(name for pair in columns for name in pair)]
  lines = [
    [
      row["image"],
      *(x for p in row["predictions"] for x in (p["name"], p["probability"])),
    ]
    for row in rows
  ]
  write_csv(file, header, lines)
