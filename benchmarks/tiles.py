"""Measures which tiles of the attention kernels are fastest on a GPU or TPU.

  python -m benchmarks.tiles --out tiles.json
  MOH_JAX_BLOCK_SIZES=tiles.json python -m moh_jax bench attention

The three kernels (forward, query gradient, key gradients) must share the number
of rows of a block. For every such number each kernel is timed with all tiles;
the number whose three fastest tiles have the smallest total time wins.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import attempt, finish, make_parser
from moh_jax.cli import command
from moh_jax.cli.bench_attention import random_active
from moh_jax.cli.main import report_errors
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.ops.attention_forms import Visible
from moh_jax.ops.head_blocks import head_blocks
from moh_jax.ops.kernels.attention import (
  BACKENDS,
  block_sizes,
  kernel_options,
  read,
)
from moh_jax.ops.kernels.problem import BlockSizes, Key, Problem, Tile
from moh_jax.ops.target import target
from moh_jax.runtime.files import replacing
from moh_jax.training import bench
from moh_jax.training.bench import Program

_KERNELS = ("forward", "dq", "dkv")  # fields of `BlockSizes`
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Workload:
  """Shapes of the attention that tiles are measured on.

  Attributes:
    head_dim: head dim, D.
    dtype: dtype of all inputs.
    batch: sequences, B.
    tokens: tokens of a sequence, N; there are as many keys.
    heads: query heads, H; there are as many key/value heads.
    active: active heads of a token, sampled at random.
    causal: whether a token sees no later keys.
    rounds: measured turns.
  """

  head_dim: int
  dtype: str
  batch: int = 8
  tokens: int = 1024
  heads: int = 16
  active: int = 8
  causal: bool = False
  rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
  """Measures head dims and adds them to a file."""
  parser = make_parser(__doc__, rounds=20)
  parser.add_argument(
    "--out", required=True, metavar="FILE", help="JSON file to add to"
  )
  parser.add_argument(
    "--head-dim",
    type=int,
    nargs="+",
    default=[64, 128],
    help="of the kernels' calls: on a TPU 128 for layers with heads of 96",
  )
  parser.add_argument("--dtype", choices=_DTYPES, default=_DTYPES[0])
  parser.add_argument(
    "--near", action="store_true", help="try only tiles like those in use"
  )
  args = parser.parse_args(argv)
  return report_errors(lambda: _run(args), False)


def _run(args: argparse.Namespace) -> int:
  out, device = command.out_file(args.out), target()
  found = read(out) if out.exists() else {}
  if device.platform not in ("gpu", "tpu"):
    raise ValueError(f"the kernels run on GPUs and TPUs, not on {device.kind}")
  rows = []
  for dim in args.head_dim:
    backend = kernel_options(device, args.dtype, dim)["backend"]
    tiles = candidates(backend)
    if args.near:
      tiles = near(block_sizes(backend, dim, args.dtype), backend)
    workload = Workload(dim, args.dtype, rounds=args.rounds)
    sizes = tune(workload, backend, tiles)
    key = Key(backend, device.kind, dim, args.dtype)
    found |= {key: sizes}
    entries = [
      k._asdict() | dataclasses.asdict(found[k]) for k in sorted(found)
    ]
    with replacing(out) as temporary:
      temporary.write_text(json.dumps(entries, indent=2) + "\n")
    rows.append({**key._asdict(), **dataclasses.asdict(sizes)})
  finish(args, rows)
  return 0


def candidates(backend: str) -> list[Tile]:
  """Tiles to try with a back end of Pallas; some may be too large."""
  if backend == "mosaic_tpu":
    sizes = itertools.product((128, 256, 512), (256, 512, 1024))
    return [Tile(*size) for size in sizes]
  if backend == "mosaic_gpu":
    sizes = itertools.product((64, 128), (64, 128, 256), (1, 2, 3))
    return [Tile(rows, keys, stages=stages) for rows, keys, stages in sizes]
  shapes = (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)
  return [Tile(*option) for option in itertools.product(*shapes)]


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
  tiles: Iterable[Tile],
  *,
  interpret: bool = False,
) -> BlockSizes:
  """Finds the fastest tiles of the three kernels on the default device.

  It prints a line for each tile: its time, or why it cannot run.

  Args:
    workload: what the kernels compute.
    backend: of Pallas, "triton" or "mosaic_tpu".
    tiles: tiles to choose from.
    interpret: run the kernels in the interpreter, which works on CPUs.

  Raises:
    ValueError: no tile runs; the message ends with the last failure.
  """
  tiles = list(tiles)
  best, smallest, last = None, float("inf"), ""
  for rows in sorted({tile.rows for tile in tiles}):
    compile_kernel = _compiler(workload, backend, rows, interpret)
    chosen, total = [], 0.0
    for kernel in _KERNELS:
      # The kernels for TPUs, and every forward kernel, take whole blocks.
      whole = kernel == "forward" or backend == "mosaic_tpu"
      programs: dict[Tile, Program] = {}
      for tile in tiles:
        if tile.rows != rows if whole else rows % tile.rows:
          continue
        program = attempt(compile_kernel, kernel, tile)
        if isinstance(program, Exception):
          last = f"{kernel} R={rows} {tile} {bench.failure(program)}"
          print(last)
        else:
          programs[tile] = program
      times = bench.interleaved(programs, workload.rounds)
      if not times:
        break
      for tile, time in times.items():
        print(f"{kernel} R={rows} {tile}: {time.median * 1e3:.3f} ms")
      chosen.append(min(times, key=lambda tile: times[tile].median))
      total += times[chosen[-1]].median
    if len(chosen) == len(_KERNELS) and total < smallest:
      best, smallest = BlockSizes(*chosen), total
  if best is None:
    raise ValueError(
      f"none of {len(tiles)} tiles runs for every kernel: {last}"
    )
  return best


def _compiler(
  workload: Workload, backend: str, rows: int, interpret: bool
) -> Callable[[str, Tile], Program]:
  """Makes the function (kernel, tile) -> program on random arrays, which ran.

  Args:
    workload: shapes of the arrays.
    backend: of Pallas, "triton" or "mosaic_tpu".
    rows: rows of a block.
    interpret: run the kernels in the interpreter.
  """
  kernels = BACKENDS[backend]
  shape = workload.batch, workload.tokens, workload.heads
  budget = HeadBudget(workload.heads, 0, workload.active, workload.head_dim)
  blocks = head_blocks(random_active(Units(budget), *shape[:2]), rows)
  q, k, v, grad = (
    jax.random.normal(key, (*shape, workload.head_dim), workload.dtype)
    for key in jax.random.split(jax.random.key(0), 4)
  )
  k, v = map(kernels.arranged, (k, v))
  visible, scale = Visible(causal=workload.causal), workload.head_dim**-0.5
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  tokens = q
  q, grad = (kernels.to_rows(problem, x) for x in (q, grad))
  queries = tokens if kernels.picks_rows else q
  sums = jnp.zeros(len(q), jnp.float32)
  arrays = queries, q, k, v, jnp.zeros_like(q), sums, grad, blocks

  def compile_kernel(kernel: str, tile: Tile) -> Program:
    def call(queries, q, k, v, out, sums, grad, blocks) -> Any:
      problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
      rows = {
        "forward": (queries,),
        "dq": (q, out, sums, grad),
        "dkv": (q, sums, sums, grad),
      }[kernel]
      return kernels.run(kernel, problem, rows, (k, v), tile)

    program = bench.compile_program(call, *arrays, loops=True)
    jax.block_until_ready(program.run())
    return program

  return compile_kernel


if __name__ == "__main__":
  sys.exit(main())
