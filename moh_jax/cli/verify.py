"""`python -m moh_jax verify`."""

import argparse
import dataclasses

from moh_jax.cli import common
from moh_jax.runtime import steps


def run(args: argparse.Namespace) -> int:
  """Prints a line per checkpoint; 1 if any is damaged."""
  newest = steps.find_step(args.checkpoint, args.step)
  wanted = (
    [newest] if args.step is not None else steps.list_steps(args.checkpoint)
  )
  reports = [steps.report(args.checkpoint, step) for step in wanted]
  if args.json != "-":
    for found in reports:
      print(found)
  common.write_json(args.json, [dataclasses.asdict(r) for r in reports])
  return 1 if any(found.damage for found in reports) else 0
