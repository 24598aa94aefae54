"""`python -m moh_jax bench input`."""

import argparse

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.data.infer import resolve
from moh_jax.speed import input as speed_input
from moh_jax.speed import timing


def run(args: argparse.Namespace) -> int:
  """Prints examples per second by stage, and which stage is the slowest."""
  config = resolve(args.config)
  measured = speed_input.measure(config, args.batches, args.steps)
  if args.json != "-":
    rates = measured["examples_per_second"]
    rows = [(stage, f"{rate:,.0f}") for stage, rate in rates.items()]
    print(common.table(rows, ("stage", "examples/s")))
    print(f"bottleneck: {measured['bottleneck']}")
    print(
      f"main thread: {measured['main_thread_share']:.2%} of a step is its work "
      f"on input, {measured['waiting_share']:.2%} it waits for input"
    )
    _print_pixels(measured.get("images_per_core", {}))
  settings = {"config": config_lib.to_dict(config)}
  common.write_json(
    args.json,
    {"machine": timing.machine(), "settings": settings, **measured},
  )
  return 0


def _print_pixels(rates: dict[str, float]) -> None:
  """Prints what one core does, if the run reads image files."""
  rows = [
    (what, f"{rates[name]:,.0f}", f"{rates[name] / rates['decode']:.0%}")
    for name, what in (
      ("decode", "decoding alone"),
      ("eval", "with evaluation's transforms"),
      ("train", "with training's transforms"),
    )
    if rates
  ]
  if rows:
    print(common.table(rows, ("from memory", "images/s and core", "share")))
