"""What one step of a TPU kernel's grid does: its blocks of rows, its tiles.

Shapes as in `tpu`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.tpu_plan import Plan
from moh_jax.ops.kernels.tpu_visits import Tables, visit_of_step
from moh_jax.ops.lanes import LANES


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of a grid.

  Attributes:
    plan: of the launch.
    lists: the tables.
    visit: the step's index in them.
    low: first block of rows within the window.
    high: end of these blocks.
    opens: whether it is the first step that adds to its rows, or keys.
    closes: whether it is the last one.
  """

  plan: Plan
  lists: Tables
  visit: jax.Array
  low: jax.Array
  high: jax.Array
  opens: jax.Array
  closes: jax.Array

  @classmethod
  def running(cls, plan: Plan, lists: Tables) -> "Step":
    """The step that is running."""
    core, step = pl.program_id(0), pl.program_id(1)
    begin, end = lists.first[core], lists.first[core + 1]
    visit = visit_of_step(core, step, lists)
    # Cores whose visits are fewer repeat their last one without work.
    works = begin + step < end
    added_to = lists.chunk if plan.keys_first else lists.window

    def same(other: jax.Array) -> jax.Array:
      equal = added_to[other] == added_to[visit]
      return equal & (lists.unit[other] == lists.unit[visit])

    opens = (visit == begin) | ~same(jnp.maximum(visit - 1, 0))
    closes = (visit == end - 1) | ~same(jnp.minimum(visit + 1, end - 1))
    low, high = lists.low[visit], lists.high[visit]
    high = jnp.where(works, high, low)
    return cls(plan, lists, visit, low, high, works & opens, works & closes)

  @property
  def first_tile(self) -> jax.Array:
    """The first tile of keys in memory."""
    return self.lists.chunk[self.visit] * self.plan.cut.chunk

  def each_block(self, work: Callable[[Any, Any, Any], None]) -> None:
    """Runs work(i, block, head) for every block of rows.

    i is its place in the window, `block` in the table, `head` its key/value
    head within the unit.
    """
    cut = self.plan.cut
    first_block = self.lists.window[self.visit] * cut.window
    first_head = self.lists.unit[self.visit] * cut.heads

    def one(i: jax.Array) -> None:
      block = first_block + i
      head = self.lists.head[block] - first_head if cut.heads > 1 else 0
      work(i, block, head)

    _loop(self.low, self.high, one)

  def each_tile(self, block: Any, work: Callable[[Any, bool], None]) -> None:
    """Runs work(j, masked) for the tiles in memory that a block's rows see.

    j is the tile's place in the chunk.
    """
    problem, chunk = self.plan.problem, self.plan.cut.chunk
    start, whole, end = (
      jnp.clip(x[block] - self.first_tile, 0, chunk) for x in self.lists[-3:]
    )
    if not problem.masks_by_value:
      _loop(start, whole, lambda j: work(j, False))
    # Without a causal mask only a last tile with padding needs one.
    padded = problem.keys % self.plan.keys
    if problem.masks_by_value or problem.visible.causal or padded:
      _loop(whole, end, lambda j: work(j, True))

  def seen(
    self, row_masks: tuple, key_masks: tuple, j: Any, *, rows_axis: int
  ) -> jax.Array:
    """Marks which keys of a tile a block's rows see.

    Args:
      row_masks: the rows' last visible keys and segments, [R, 1 or L] if
        rows_axis is 0, else [1, R]; None where the call has no such mask.
      key_masks: the keys' mask and segments, [1, L], or [L, 1 or R].
      j: the tile's place in the chunk.
      rows_axis: 0 gives [R, L], 1 gives [L, R].
    """
    (last, row_segments), (key_mask, segments) = row_masks, key_masks
    size, problem = self.plan.keys, self.plan.problem
    shape = (1, size) if rows_axis == 0 else (size, 1)
    position = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    position = position + (self.first_tile + j) * size
    result = position < problem.keys
    if last is not None:
      result = result & (position <= last)
    if key_mask is not None:
      result = result & (key_mask != 0)
    if segments is not None:
      result = result & (segments == row_segments)
    return result


def place(plan: Plan, head: Any, j: Any) -> tuple:
  """The index of a tile in what `Plan.keys_or_values` loads.

  Args:
    plan: of the launch.
    head: key/value head within the unit.
    j: the tile's place in the chunk.

  Returns:
    The index of [L, D].
  """
  return head, tile_of(plan, j), slice(None)


def tile_of(plan: Plan, j: Any) -> Any:
  """The keys of tile j among those in memory."""
  if plan.cut.chunk == 1:
    return slice(None)
  return pl.ds(pl.multiple_of(j * plan.keys, plan.keys), plan.keys)


def each_tile_in_memory(plan: Plan, work: Callable[[Any, Any], None]) -> None:
  """Runs work(head, j) for every tile of a unit's keys that is in memory."""
  chunk, heads = plan.cut.chunk, plan.cut.heads

  def one(i: jax.Array) -> None:
    head = lax.div(i, chunk) if heads > 1 else 0
    work(head, lax.rem(i, chunk))

  _loop(0, heads * chunk, one)


def as_columns(row: jax.Array) -> jax.Array:
  """Transposes a row [1, X] to [X, LANES], the same in every lane."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def repeat_lanes(columns: jax.Array, width: int) -> jax.Array:
  """Repeats [X, LANES], the same in every lane, to [X, width].

  Unlike broadcasting [X, 1] it moves nothing between lanes.
  """
  copies = pl.cdiv(width, LANES)
  if copies > 1:
    columns = jnp.concatenate([columns] * copies, axis=1)
  return columns[:, :width]


def _loop(start: Any, end: Any, work: Callable[[Any], None]) -> None:
  lax.fori_loop(start, end, lambda i, _: work(i), None)
