"""Compares depthwise 3x3 convolutions: shifted views and XLA's grouped one.

  python -m benchmarks.window --json benchmarks/results/window_cpu.json

The shapes are those of the first stage of MoH-ViT S at 224 px with batch 4.
"""

import functools

import jax

from benchmarks.common import finish, make_parser
from moh_jax.ops import window
from moh_jax.training import timing

_SHAPE = (4, 56, 56, 384)


def main() -> None:
  """Measures and prints a table."""
  args = make_parser(__doc__, rounds=7).parse_args()
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
  rows = [
    {"form": name, "ms": t.median * 1e3, "spread": t.spread}
    for name, t in timing.interleaved(calls, args.rounds).items()
  ]
  finish(args, rows, shape=_SHAPE)


if __name__ == "__main__":
  main()
