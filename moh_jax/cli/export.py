"""`python -m moh_jax export`."""

import argparse

from moh_jax.convert.checkpoints import export


def run(args: argparse.Namespace) -> int:
  """Writes the weights under their public names."""
  count = export(
    args.checkpoint,
    args.out,
    to=args.to,
    step=args.step,
    use_ema=not args.no_ema,
    dtype=args.dtype,
    shard_size=args.shard_size,
    license=args.license,
    scores=args.scores,
    verify=args.verify,
  )
  print(f"{count:,} parameters written to {args.out}")
  return 0
