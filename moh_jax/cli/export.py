"""`python -m moh_jax export`."""

import argparse

from moh_jax.convert.checkpoints import export


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("--checkpoint", required=True, metavar="DIR")
  parser.add_argument(
    "--step", type=int, help="which checkpoint (default: the newest)"
  )
  parser.add_argument(
    "--out", required=True, metavar="FILE", help="safetensors file to write"
  )
  parser.add_argument(
    "--no-ema", action="store_true", help="export the raw parameters"
  )


def run(args: argparse.Namespace) -> int:
  """Writes the weights under their public names."""
  count = export(
    args.checkpoint, args.out, step=args.step, use_ema=not args.no_ema
  )
  print(f"{count:,} parameters written to {args.out}")
  return 0
