"""`python -m moh_jax bench input`."""

import argparse
import os
from typing import Any

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.config.sources import sources_with
from moh_jax.data.infer import resolve
from moh_jax.data.sources import make_source
from moh_jax.speed import input as speed_input
from moh_jax.speed import pixels, timing


def run(args: argparse.Namespace) -> int:
  """Prints examples per second by stage, and which stage is the slowest."""
  config = resolve(args.config)
  if args.pixels:
    measured = {"pixels": _time_pixels(config)}
    show = _print_pixels
  else:
    measured = speed_input.measure(config, args.batches, args.steps)
    show = _print_stages
  if args.json != "-":
    show(measured)
  settings = {"config": config_lib.to_dict(config)}
  common.write_json(
    args.json,
    {"machine": timing.machine(), "settings": settings, **measured},
  )
  return 0


def _print_stages(measured: dict[str, Any]) -> None:
  rates = measured["examples_per_second"]
  rows = [(stage, f"{rate:,.0f}") for stage, rate in rates.items()]
  print(common.table(rows, ("stage", "examples/s")))
  print(f"bottleneck: {measured['bottleneck']}")
  print(
    f"main thread: {measured['main_thread_share']:.2%} of a step is its work "
    f"on input, {measured['waiting_share']:.2%} it waits for input"
  )


def _time_pixels(config: config_lib.Config) -> dict[str, Any]:
  decoded = sources_with(config_lib.DataConfig, "decode")
  if config.data.source not in decoded:
    raise ValueError(
      f"--pixels: data.source={config.data.source!r} must be one of {decoded}, "
      "whose images are decoded"
    )
  threads = min(config.data.num_threads, os.cpu_count() or 1)
  return pixels.measure(config, make_source(config, "train"), threads)


def _print_pixels(measured: dict[str, Any]) -> None:
  times = measured["pixels"]
  whole = times["decode"]
  rows = [
    (
      what,
      f"{times[name]['per_second']:,.0f}",
      f"{times[name]['per_second'] / whole['per_second']:.0%}",
      f"{times[name]['cpu_ms']:.2f}",
      f"{whole['cpu_ms'] / times[name]['cpu_ms']:.0%}",
    )
    for name, what in (
      ("decode", "decoding alone"),
      ("eval", "and transforms of evaluation"),
      ("train", "and transforms of training"),
    )
  ]
  names = "from memory", "images/s and thread", "share", "CPU ms/image", "share"
  print(common.table(rows, names))
