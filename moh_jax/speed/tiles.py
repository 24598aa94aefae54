"""Measures which tiles of the attention kernels are fastest on a device.

The three kernels (forward, query gradient, key gradients) must share the number
of rows of a block. For every such number each kernel is timed with all tiles;
the number whose three fastest tiles have the smallest total time wins.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget
from moh_jax.files import replacing
from moh_jax.ops.head_blocks import gather_rows, head_blocks
from moh_jax.ops.kernels.attention import PLATFORMS
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import BlockSizes, Tile, read
from moh_jax.ops.visible import Visible
from moh_jax.speed import timing
from moh_jax.speed.attention import random_active
from moh_jax.speed.options import Workload
from moh_jax.speed.programs import Program, compile_program, default_loops

_KERNELS = ("forward", "dq", "dkv")  # fields of `BlockSizes`


def write(
  path: str | os.PathLike, sizes: dict[tuple[str, int, str], BlockSizes]
) -> None:
  """Adds tile sizes to a JSON file that `kernels.sizes.read` reads.

  Args:
    path: file to create or to add to; its other entries stay.
    sizes: tile sizes by (device kind, head dim, dtype).

  Raises:
    ValueError: `path` exists and is not such a file.
  """
  path = pathlib.Path(path)
  if path.exists():
    sizes = read(path) | sizes
  names = ("device", "head_dim", "dtype")
  entries = [
    dict(zip(names, key)) | dataclasses.asdict(sizes[key])
    for key in sorted(sizes)
  ]
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(entries, indent=2) + "\n")


def candidates(platform: str) -> list[Tile]:
  """Tiles to try on a platform, "gpu" or "tpu"; some may be too large."""
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
  interpret: bool = False,
  report: Callable[[str], None] = lambda line: None,
) -> BlockSizes:
  """Finds the fastest tiles of the three kernels on the default device.

  Args:
    workload: what the kernels compute.
    platform: "gpu" or "tpu".
    tiles: tiles to choose from; None is `candidates(platform)`.
    interpret: run the kernels in the interpreter, which works on CPUs.
    report: called with one line for each tile: its time, or why it cannot run.

  Raises:
    ValueError: no tile runs; the message ends with the last failure.
  """
  tiles = list(candidates(platform) if tiles is None else tiles)
  best, smallest, faults = None, float("inf"), []

  def report_fault(line: str) -> None:
    faults.append(line)
    report(line)

  for rows in sorted({tile.rows for tile in tiles}):
    bench = _Bench(workload, platform, rows, interpret)
    chosen, total = [], 0.0
    for kernel in _KERNELS:
      programs = _programs(bench, kernel, tiles, report_fault)
      if not programs:
        break
      seconds = _seconds(programs, workload.rounds)
      for name, value in seconds.items():
        report(f"{name}: {value * 1e3:.3f} ms")
      fastest = min(seconds, key=seconds.get)
      chosen.append(programs[fastest][0])
      total += seconds[fastest]
    if len(chosen) == len(_KERNELS) and total < smallest:
      best, smallest = BlockSizes(*chosen), total
  if best is None:
    last = "".join(faults[-1:])
    raise ValueError(
      f"none of {len(tiles)} tiles runs for every kernel: {last}"
    )
  return best


def _programs(
  bench: "_Bench",
  kernel: str,
  tiles: list[Tile],
  report_fault: Callable[[str], None],
) -> dict[str, tuple[Tile, Program]]:
  """Compiles a kernel with every tile; returns those that run, by name."""
  programs = {}
  for tile in tiles:
    if not bench.fits(kernel, tile):
      continue
    name = f"{kernel} R={bench.rows} {tile}"
    try:
      program = bench.program(kernel, tile)
      jax.block_until_ready(program.run())
    except Exception as error:  # compilers and drivers share no error class
      why = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
      report_fault(f"{name} does not run: {why}")
    else:
      programs[name] = tile, program
  return programs


def _seconds(
  programs: dict[str, tuple[Tile, Program]], rounds: int
) -> dict[str, float]:
  """Seconds of one evaluation of each program, timed in turns."""
  calls = {name: program.run for name, (_, program) in programs.items()}
  times = timing.interleaved(calls, rounds)
  return {
    name: times[name].median / program.loops
    for name, (_, program) in programs.items()
  }


class _Bench:
  """The kernels on random arrays of a workload, at one number of block rows."""

  def __init__(
    self, workload: Workload, platform: str, rows: int, interpret: bool
  ):
    self._kernels = PLATFORMS[platform]
    self._platform, self.rows = platform, rows
    shape = workload.batch, workload.tokens, workload.heads
    budget = HeadBudget(workload.heads, 0, workload.active, workload.head_dim)
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
    """Whether a kernel can use a tile for blocks of `rows` rows."""
    if kernel == "forward" or self._platform == "tpu":
      return tile.rows == self.rows
    return self.rows % tile.rows == 0

  def program(self, kernel: str, tile: Tile) -> Program:
    """Compiles a kernel ("forward", "dq" or "dkv") with a tile."""
    sums = jnp.zeros(len(self._q), jnp.float32)

    def call(q, k, v, out, sums, grad, blocks):
      problem = Problem(
        k.shape, k.dtype, self._visible, blocks, self._scale, self._interpret
      )
      if kernel == "forward":
        return self._kernels.forward(problem, q, (k, v), tile)
      if kernel == "dq":
        rows = q, out, sums, grad
        return self._kernels.query_gradient(problem, rows, (k, v), tile)
      rows = q, sums, sums, grad
      return self._kernels.key_gradients(problem, rows, (k, v), tile)

    args = (
      self._q, self._k, self._v, self._out, sums, self._grad, self._blocks
    )  # fmt: skip
    return compile_program(call, *args, loops=default_loops())
