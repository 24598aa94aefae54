"""`python -m moh_jax convert`."""

import argparse

from moh_jax.convert.checkpoints import convert
from moh_jax.data.infer import resolve


def run(args: argparse.Namespace) -> int:
  """Writes the converted checkpoint."""
  name, count = convert(
    args.format,
    args.source,
    args.out,
    key=args.key,
    model=args.model,
    config=resolve(args.config) if args.config else None,
    image_size=args.image_size,
  )
  print(f"{name}: {count:,} parameters written to {args.out}")
  return 0
