"""Measures which tiles of the attention kernels are fastest on a device.

The three kernels are timed one by one for every number of rows of a block,
which they share: the best three of the rows with the smallest sum win.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from moh_jax.bench import timing
from moh_jax.bench.attention import random_active
from moh_jax.ops.head_blocks import gather_rows, head_blocks
from moh_jax.ops.kernels.attention import PLATFORMS
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import BlockSizes, Tile
from moh_jax.ops.routing import HeadBudget
from moh_jax.ops.visible import Visible


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is attended to while tiles are measured.

  Attributes:
    batch: B.
    tokens: N, also the keys.
    num_heads: H, also of keys and values.
    active: heads of a token; they are drawn at random.
    head_dim: D.
    dtype: of all inputs.
    causal: whether later keys are hidden.
  """

  batch: int = 8
  tokens: int = 1024
  num_heads: int = 16
  active: int = 8
  head_dim: int = 64
  dtype: str = "bfloat16"
  causal: bool = False


def candidates(platform: str) -> list[Tile]:
  """Tiles that are worth a try; too large ones fail and are passed over."""
  if platform == "tpu":
    sizes = itertools.product((128, 256, 512), (256, 512, 1024))
    return [Tile(*size) for size in sizes]
  options = (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)
  return [Tile(*option) for option in itertools.product(*options)]


def tune(
  workload: Workload,
  platform: str,
  tiles: Iterable[Tile] | None = None,
  *,
  repeats: int = 20,
  interpret: bool = False,
  report: Callable[[str], None] = lambda line: None,
) -> BlockSizes:
  """Measures tiles on the default device.

  Args:
    workload: what is computed.
    platform: "gpu" or "tpu".
    tiles: to choose from; None is `candidates`.
    repeats: calls of every kernel, whose median counts.
    interpret: runs the kernels in the interpreter, for tests.
    report: is told every result in a line.

  Returns:
    The fastest.

  Raises:
    ValueError: no tile runs, for what the last error says.
  """
  tiles = list(candidates(platform) if tiles is None else tiles)
  best, least, error = None, float("inf"), None
  for rows in sorted({tile.rows for tile in tiles}):
    bench = _Bench(workload, platform, rows, interpret)
    chosen, total = [], 0.0
    for kernel in ("forward", "dq", "dkv"):
      times = {}
      for tile in tiles:
        if not bench.fits(kernel, tile):
          continue
        try:
          times[tile] = bench.seconds(kernel, tile, repeats)
        except Exception as caught:  # whatever the compilers raise
          error = caught
          continue
        report(f"{kernel} R={rows} {tile}: {times[tile] * 1e3:.3f} ms")
      if not times:
        total = float("inf")
        break
      chosen.append(min(times, key=times.get))
      total += times[chosen[-1]]
    if total < least:
      best, least = BlockSizes(*chosen), total
  if best is None:
    raise ValueError(f"none of {len(tiles)} tiles runs: {error}")
  return best


class _Bench:
  """Kernels of one workload and one number of rows of a block."""

  def __init__(
    self, workload: Workload, platform: str, rows: int, interpret: bool
  ):
    self._kernels = PLATFORMS[platform]
    self._platform, self._rows = platform, rows
    shape = workload.batch, workload.tokens, workload.num_heads
    budget = HeadBudget(
      workload.num_heads, 0, workload.active, workload.head_dim
    )
    self._blocks = head_blocks(random_active(budget, *shape[:2]), rows)
    q, self._k, self._v, grad = (
      jax.random.normal(key, (*shape, workload.head_dim), workload.dtype)
      for key in jax.random.split(jax.random.key(0), 4)
    )
    self._q, self._grad = (gather_rows(x, self._blocks) for x in (q, grad))
    self._visible = Visible(causal=workload.causal)
    self._scale = workload.head_dim**-0.5
    self._interpret = interpret
    self._out = jnp.zeros_like(self._q)

  def fits(self, kernel: str, tile: Tile) -> bool:
    """Whether a tile is one for blocks of these rows."""
    if kernel == "forward" or self._platform == "tpu":
      return tile.rows == self._rows
    return self._rows % tile.rows == 0

  def seconds(self, kernel: str, tile: Tile, repeats: int) -> float:
    """Of one call."""
    sums = jnp.zeros(len(self._q), jnp.float32)

    @jax.jit
    def call(q, k, v, out, sums, grad, blocks):
      problem = Problem(
        k.shape, k.dtype, self._visible, blocks, self._scale, self._interpret
      )
      if kernel == "forward":
        return self._kernels.forward(problem, q, k, v, tile)
      if kernel == "dq":
        rows = q, k, v, out, sums, grad
        return self._kernels.query_gradient(problem, *rows, tile)
      rows = q, k, v, sums, sums, grad
      return self._kernels.key_gradients(problem, *rows, tile)

    args = (
      self._q, self._k, self._v, self._out, sums, self._grad, self._blocks
    )  # fmt: skip
    calls = {kernel: lambda: call(*args)}
    return timing.interleaved(calls, repeats)[kernel].median
