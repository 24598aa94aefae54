"""Measures which tiles of the attention kernels are fastest on a device.

The three kernels (forward, query gradient, key gradients) must share the number
of rows of a block. For every such number each kernel is timed with all tiles;
the number whose three fastest tiles have the smallest total time wins.
"""

import dataclasses
import functools
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
from moh_jax.ops.head_blocks import head_blocks
from moh_jax.ops.kernels.backends import BACKENDS, read
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import BlockSizes, Key, Tile
from moh_jax.ops.visible import Visible
from moh_jax.speed import timing
from moh_jax.speed.attention import random_active
from moh_jax.speed.options import Workload
from moh_jax.speed.programs import Program, compile_program, default_loops

_KERNELS = ("forward", "dq", "dkv")  # fields of `BlockSizes`


def write(path: str | os.PathLike, sizes: dict[Key, BlockSizes]) -> None:
  """Adds tile sizes to a JSON file that `kernels.backends.read` reads.

  Args:
    path: file to create or to add to; its other entries stay.
    sizes: the sizes to add.

  Raises:
    ValueError: `path` exists and is not such a file.
  """
  path = pathlib.Path(path)
  if path.exists():
    sizes = read(path) | sizes
  entries = [
    key._asdict() | dataclasses.asdict(sizes[key]) for key in sorted(sizes)
  ]
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(entries, indent=2) + "\n")


def candidates(backend: str) -> list[Tile]:
  """Tiles to try with a back end of Pallas; some may be too large."""
  if backend == "mosaic_tpu":
    sizes = itertools.product((128, 256, 512), (256, 512, 1024))
    return [Tile(*size) for size in sizes]
  if backend == "mosaic_gpu":
    sizes = itertools.product((64, 128), (64, 128, 256), (1, 2, 3))
    return [Tile(rows, keys, stages=stages) for rows, keys, stages in sizes]
  options = (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)
  return [Tile(*option) for option in itertools.product(*options)]


def near(sizes: BlockSizes, backend: str) -> list[Tile]:
  """A few tiles to try in little time: given ones, and with other keys.

  Args:
    sizes: tiles that are fast already.
    backend: of Pallas; the kernels for TPUs take other rows as well.
  """
  tiles = []
  for tile in (sizes.forward, sizes.dq, sizes.dkv):
    for keys in (tile.keys, 2 * tile.keys, tile.keys // 2):
      tiles.append(dataclasses.replace(tile, keys=keys))
      if backend == "mosaic_tpu":
        tiles.append(dataclasses.replace(tile, keys=keys, rows=2 * tile.rows))
  return list(dict.fromkeys(tile for tile in tiles if tile.keys >= 16))


def tune(
  workload: Workload,
  backend: str,
  tiles: Iterable[Tile] | None = None,
  *,
  interpret: bool = False,
  report: Callable[[str], None] = lambda line: None,
) -> BlockSizes:
  """Finds the fastest tiles of the three kernels on the default device.

  Args:
    workload: what the kernels compute.
    backend: of Pallas, "triton" or "mosaic_tpu".
    tiles: tiles to choose from; None is `candidates(backend)`.
    interpret: run the kernels in the interpreter, which works on CPUs.
    report: called with one line for each tile: its time, or why it cannot run.

  Raises:
    ValueError: no tile runs; the message ends with the last failure.
  """
  tiles = list(candidates(backend) if tiles is None else tiles)
  best, smallest, faults = None, float("inf"), []

  def report_fault(line: str) -> None:
    faults.append(line)
    report(line)

  for rows in sorted({tile.rows for tile in tiles}):
    compile_kernel = _compiler(workload, backend, rows, interpret)
    chosen, total = [], 0.0
    for kernel in _KERNELS:
      fitting = {
        f"{kernel} R={rows} {tile}": tile
        for tile in tiles
        if _fits(backend, kernel, rows, tile)
      }
      compile_tile = functools.partial(compile_kernel, kernel)
      rounds = workload.rounds
      seconds = _seconds(compile_tile, fitting, rounds, report_fault)
      if not seconds:
        break
      for name, value in seconds.items():
        report(f"{name}: {value * 1e3:.3f} ms")
      fastest = min(seconds, key=seconds.get)
      chosen.append(fitting[fastest])
      total += seconds[fastest]
    if len(chosen) == len(_KERNELS) and total < smallest:
      best, smallest = BlockSizes(*chosen), total
  if best is None:
    last = "".join(faults[-1:])
    raise ValueError(
      f"none of {len(tiles)} tiles runs for every kernel: {last}"
    )
  return best


def _seconds(
  compile_tile: Callable[[Tile], Program],
  tiles: dict[str, Tile],
  rounds: int,
  report_fault: Callable[[str], None],
) -> dict[str, float]:
  """Seconds of a kernel with each tile that runs, by name, timed in turns."""
  programs = {}
  for name, tile in tiles.items():
    try:
      program = compile_tile(tile)
      jax.block_until_ready(program.run())
    except Exception as error:  # compilers and drivers share no error class
      why = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
      report_fault(f"{name} does not run: {why}")
    else:
      programs[name] = program
  calls = {name: program.run for name, program in programs.items()}
  times = timing.interleaved(calls, rounds)
  return {name: times[name].median / programs[name].loops for name in calls}


def _fits(backend: str, kernel: str, rows: int, tile: Tile) -> bool:
  """Whether a kernel can use a tile for blocks of `rows` rows."""
  if kernel == "forward" or backend == "mosaic_tpu":
    return tile.rows == rows
  return rows % tile.rows == 0


def _compiler(
  workload: Workload, backend: str, rows: int, interpret: bool
) -> Callable[[str, Tile], Program]:
  """Makes the function (kernel, tile) -> program on random arrays.

  Args:
    workload: shapes of the arrays.
    backend: of Pallas, "triton" or "mosaic_tpu".
    rows: rows of a block.
    interpret: run the kernels in the interpreter.
  """
  kernels = BACKENDS[backend]
  shape = workload.batch, workload.tokens, workload.heads
  budget = HeadBudget(workload.heads, 0, workload.active, workload.head_dim)
  blocks = head_blocks(random_active(budget, *shape[:2]), rows)
  q, k, v, grad = (
    jax.random.normal(key, (*shape, workload.head_dim), workload.dtype)
    for key in jax.random.split(jax.random.key(0), 4)
  )
  k, v = map(kernels.arranged, (k, v))
  visible, scale = Visible(causal=workload.causal), workload.head_dim**-0.5
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  queries = q
  q, grad = (kernels.to_rows(problem, x) for x in (q, grad))
  if not kernels.picks_rows:
    queries = q
  sums = jnp.zeros(len(q), jnp.float32)
  arrays = queries, q, k, v, jnp.zeros_like(q), sums, grad, blocks

  def compile_kernel(kernel: str, tile: Tile) -> Program:
    def call(queries, q, k, v, out, sums, grad, blocks):
      problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
      if kernel == "forward":
        return kernels.forward(problem, queries, (k, v), tile)
      if kernel == "dq":
        rows = q, out, sums, grad
        return kernels.query_gradient(problem, rows, (k, v), tile)
      rows = q, sums, sums, grad
      return kernels.key_gradients(problem, rows, (k, v), tile)

    return compile_program(call, *arrays, loops=default_loops())

  return compile_kernel
