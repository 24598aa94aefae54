"""Compares depthwise 3x3 convolutions: shifted views and XLA's grouped one.

  python -m benchmarks.window --json benchmarks/results/window_cpu.json

The shapes are those of the first stage of MoH-ViT S at 224 px with batch 4.
"""

import argparse
import functools

import jax

from moh_jax.cli import common
from moh_jax.ops import window
from moh_jax.speed import timing

_SHAPE = (4, 56, 56, 384)


def main() -> None:
  """Measures and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=7)
  common.add_json(parser)
  args = parser.parse_args()
  x = jax.random.normal(jax.random.key(0), _SHAPE)
  kernel = jax.random.normal(jax.random.key(1), (3, 3, _SHAPE[-1]))

  def grouped(x, kernel):
    return jax.lax.conv_general_dilated(
      x,
      kernel[:, :, None],
      (1, 1),
      "SAME",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=_SHAPE[-1],
    )

  taps = functools.partial(window._taps_grad, window=3)
  taps_by_row = functools.partial(window._taps_grad_by_row, window=3)
  functions = {
    "forward, shifted views": (window.depthwise_conv, kernel),
    "forward, grouped convolution": (grouped, kernel),
    "tap gradient, row by row": (taps_by_row, x),
    "tap gradient, whole map": (taps, x),
  }
  calls = {
    name: functools.partial(jax.jit(function), x, other)
    for name, (function, other) in functions.items()
  }
  times = timing.interleaved(calls, args.rounds)
  rows = [
    {"form": name, "ms": t.median * 1e3, "spread": t.spread}
    for name, t in times.items()
  ]
  cells = [(r["form"], f"{r['ms']:.1f}", f"{r['spread']:.0%}") for r in rows]
  print(common.table(cells, ("form", "ms", "spread")))
  result = {"machine": timing.machine(), "shape": _SHAPE, "rows": rows}
  common.write_json(args.json, result)


if __name__ == "__main__":
  main()
