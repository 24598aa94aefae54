"""`python -m moh_jax convert`."""

import argparse

from moh_jax.convert.checkpoints import convert


def run(args: argparse.Namespace) -> int:
  """Writes the converted checkpoint."""
  name, count = convert(
    args.format,
    args.source,
    args.out,
    key=args.key,
    model=args.model,
    config=args.config,
    image_size=args.image_size,
  )
  print(f"{name}: {count:,} parameters written to {args.out}")
  return 0
