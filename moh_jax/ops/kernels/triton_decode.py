"""The decoding kernel for GPUs (Pallas Triton).

The slots that a text's token sees are cut into S splits, so that few heads
fill a GPU too. A program reads one split of one key/value head, tile by tile;
the splits are joined by their log-sum-exp. The softmax is in base 2, which the
hardware computes directly.

Shapes: B texts, K key/value heads, G query heads of a key/value head, M slots,
D head dim, L entries of a list of heads, S splits, T slots of a tile, R rows
(query heads) of a program, W columns of a slice of the head dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import DecodeProblem, Tile, fitting, times
from moh_jax.ops.kernels.triton import (
  SMALLEST,
  Columns,
  Slices,
  launch,
  load,
  plgpu,
  product,
)

# A token's rows are few, so only the slots of a tile matter.
TILES = {
  2: {64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 4, 2)},
  4: {64: Tile(16, 64, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
}
# Programs that fill a GPU: two to four for each of 132 processors.
_MAX_PROGRAMS = 512
_MIN_SLOTS = 256  # of a split: joining two costs as much as reading a few slots
# A program has four warps whatever its rows are: more rows of wide heads would
# not fit a GPU's registers and shared memory.
_MAX_ROWS, _MAX_WIDE_ROWS = 64, 16
_WIDE = 128  # heads with a larger head dim are wide


def attend(problem: DecodeProblem, q: jax.Array) -> jax.Array:
  """Computes the attention of the heads in the lists.

  Args:
    problem: the call.
    q: [B, K, G, D] queries in the dtype of the products.

  Returns:
    [B, K, G, D] float32, undefined for heads that are in no list.
  """
  out, log_sums = Plan(problem, q.shape[2]).call(q)
  # A text in a list sees a slot, so the highest of its splits is above -inf.
  weights = jnp.exp2(log_sums - log_sums.max(2, keepdims=True))
  total = weights.sum(2)[..., None]
  return (out * weights[..., None]).sum(2) / total


def split_count(programs: int, slots: int) -> int:
  """Into how many splits to cut a text so that few programs fill a GPU.

  Args:
    programs: programs of one split.
    slots: M.

  Returns:
    S, for instance 4 for 128 programs and 4,096 slots.
  """
  return max(1, min(_MAX_PROGRAMS // programs, slots // _MIN_SLOTS))


def split_tiles(first: Any, end: Any, split: Any, splits: int, keys: int):
  """The tiles of slots that a program reads.

  Args:
    first: [] int32 first slot that the token sees.
    end: [] int32 slot after the last one.
    split: [] int32, the program's split.
    splits: S.
    keys: T.

  Returns:
    First tile and the tile after the last one; equal or in reverse order if the
    split has none.
  """
  begin = lax.div(first, keys)
  stop = lax.div(end + keys - 1, keys)
  each = lax.div(stop - begin + splits - 1, splits)
  begin = begin + split * each
  return begin, jnp.minimum(begin + each, stop)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The launch of the kernel.

  Attributes:
    problem: the call.
    group: G.
  """

  problem: DecodeProblem
  group: int

  @functools.cached_property
  def tile(self) -> Tile:
    """Sizes of a program's tile: R rows and T slots."""
    tile = fitting(TILES, self.problem.head_dim, self.problem.dtype)
    most = _MAX_ROWS if self.problem.head_dim <= _WIDE else _MAX_WIDE_ROWS
    rows = pl.next_power_of_2(max(SMALLEST, min(self.group, most)))
    slots = max(SMALLEST, pl.next_power_of_2(self.problem.keys))
    return dataclasses.replace(tile, rows=rows, keys=min(tile.keys, slots))

  @property
  def row_tiles(self) -> int:
    """Tiles of rows of a key/value head, G / R rounded up."""
    return pl.cdiv(self.group, self.tile.rows)

  @property
  def grid(self) -> tuple[int, int, int]:
    """Programs: texts, entries of their lists by tiles of rows, splits."""
    batch, lists = self.problem.batch, self.problem.entries * self.row_tiles
    return batch, lists, split_count(batch * lists, self.problem.keys)

  @functools.cached_property
  def columns(self) -> Columns:
    """How rows are loaded."""
    return Columns.of(self.problem.head_dim, self.problem.dtype)

  def call(self, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel.

    Args:
      q: [B, K, G, D].

    Returns:
      [B, K, S, G, D] float32 attention over each split, and the base-2
      log-sum-exp [B, K, S, G], -inf where a split has no slot. Both are
      undefined for heads that are in no list.
    """
    problem, splits = self.problem, self.grid[2]
    batch, kv_heads, group, dim = q.shape
    rows, width = self.row_tiles * self.tile.rows, self.columns.width
    slots = pl.cdiv(problem.keys, self.tile.keys) * self.tile.keys

    def whole(*shape: int) -> pl.BlockSpec:
      return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    table = (
      problem.heads.head, problem.heads.count, problem.first, problem.end
    )  # fmt: skip
    stored = (problem.cache.k, problem.cache.v)
    scales = jax.tree.map(
      lambda x: x.reshape(batch, kv_heads, -1),
      (problem.cache.k_scale, problem.cache.v_scale),
    )
    inputs = table, q, stored, scales
    in_specs = (
      tuple(whole(*x.shape) for x in table),
      whole(batch, kv_heads, rows, width),
      (whole(batch, kv_heads, slots, width),) * 2,
      jax.tree.map(lambda _: whole(batch, kv_heads, slots), scales),
    )
    shape = batch, kv_heads, splits, group
    outputs = (
      jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    return launch(
      functools.partial(_kernel, plan=self),
      self.tile,
      out_shape=outputs,
      grid=self.grid,
      in_specs=in_specs,
      out_specs=(whole(*shape[:3], rows, width), whole(*shape[:3], rows)),
      interpret=problem.interpret,
      name="moh_decode",
    )(*inputs)

  def load(self, ref: Any, place: tuple, rows: jax.Array) -> Slices:
    """Loads rows as `Columns.load`, in the dtype of the products or wider."""
    parts = self.columns.load(ref, place, rows[:, None])
    dtype = jnp.promote_types(self.problem.dtype, ref.dtype)
    return tuple(part.astype(dtype) for part in parts)


def _kernel(
  table: tuple, q_ref: Any, stored: tuple, scales: tuple, out_ref: Any,
  sum_ref: Any, *, plan: Plan,
) -> None:  # fmt: skip
  heads, count, firsts, ends = table
  text, split = pl.program_id(0), pl.program_id(2)
  entry = lax.div(pl.program_id(1), plan.row_tiles)
  row_tile = lax.rem(pl.program_id(1), plan.row_tiles)

  @pl.when(entry < count[text])
  def _() -> None:
    head, first, end = heads[text, entry], firsts[text], ends[text]
    rows = pl.ds(row_tile * plan.tile.rows, plan.tile.rows)
    in_group = row_tile * plan.tile.rows + jnp.arange(plan.tile.rows)
    in_group = in_group < plan.group
    q = plan.load(q_ref, (text, head, rows), in_group)

    def step(j: jax.Array, carry: tuple) -> tuple:
      acc, highest, total = carry
      slot = j * plan.tile.keys + jnp.arange(plan.tile.keys, dtype=jnp.int32)
      seen = (slot >= first) & (slot < end)
      place = text, head, pl.ds(j * plan.tile.keys, plan.tile.keys)

      def scaled(x: jax.Array, scale_ref: Any) -> jax.Array:
        if scale_ref is None:
          return x
        return x * load(scale_ref.at[place], seen)[None]

      logits = product(q, plan.load(stored[0], place, seen))
      logits = scaled(logits * plan.problem.log2_scale, scales[0])
      logits = jnp.where(seen[None], logits, -jnp.inf)
      # Every tile has a slot that is seen, so this is above -inf.
      new = jnp.maximum(highest, logits.max(1))
      decay = jnp.exp2(highest - new)
      weights = jnp.exp2(logits - new[:, None])
      total = total * decay + weights.sum(1)
      v = plan.load(stored[1], place, seen)
      weights = scaled(weights, scales[1]).astype(v[0].dtype)
      acc = tuple(
        x * decay[:, None] + times(weights, part) for x, part in zip(acc, v)
      )
      return acc, new, total

    lowest = jnp.full(plan.tile.rows, -jnp.inf, jnp.float32)
    zeros = plan.columns.zeros(plan.tile.rows)
    begin, stop = split_tiles(first, end, split, plan.grid[2], plan.tile.keys)
    acc, highest, total = lax.fori_loop(
      begin, stop, step, (zeros, lowest, jnp.zeros_like(lowest))
    )
    has_slots = total > 0
    total = jnp.where(has_slots, total, 1.0)
    acc = tuple(x / total[:, None] for x in acc)
    place = text, head, split, rows
    plan.columns.store(out_ref, place, acc, in_group[:, None])
    log_sum = jnp.where(has_slots, highest + jnp.log2(total), -jnp.inf)
    plgpu.store(sum_ref.at[place], log_sum, mask=in_group)
