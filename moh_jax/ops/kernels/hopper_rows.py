"""Work of the Hopper kernels that hold a tile of rows and loop over the keys.

Shapes as in `hopper`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.hopper_launch import Launch, Turns, alternating
from moh_jax.ops.kernels.hopper_masks import Masks, hide, masks
from moh_jax.ops.kernels.hopper_program import PART, Ring, loop
from moh_jax.ops.kernels.problem import Arrays
from moh_jax.ops.kernels.triton_tables import keys_of_rows


class Work(NamedTuple):
  """A tile of rows, its key/value head, and the tiles of keys that it reads.

  Numbers; the last four are those of `Bounds`.
  """

  tile: Any
  batch: Any
  head: Any
  begin: Any
  whole_begin: Any
  whole_end: Any
  end: Any


@dataclasses.dataclass(frozen=True)
class RowPart:
  """A consumer's part of a piece of work.

  Attributes:
    launch: the kernel.
    work: the piece.
    consumer: number of the consumer.
    offset: what turns the index of a tile of keys into its step in the rings.
    masks: references.
    keys: ring of the keys.
    values: ring of the values.
    turns: of the consumers.
  """

  launch: "RowLaunch"
  work: Work
  consumer: Any
  offset: Any
  masks: Masks
  keys: Ring
  values: Ring
  turns: Turns

  @property
  def first(self) -> jax.Array:
    """The first row of the part."""
    return self.work.tile * self.launch.rows + self.consumer * PART

  def own(self, tile: Any) -> Any:
    """The part's rows of a tile in shared memory."""
    return tile.at[pl.ds(self.consumer * PART, PART)]

  def over_keys(self, step: Callable, carry: Any) -> Any:
    """Loops over the tiles of keys.

    Args:
      step: (turn, hide, carry) -> carry, where turn is the step in the rings
        and `hide` sets hidden logits [PART, L] to -inf.
      carry: its first value.

    Returns:
      The last carry.
    """
    hidden = self._hidden()

    def visit(j: jax.Array, carry: Any) -> Any:
      return step(self.offset + j, functools.partial(hidden, j), carry)

    return loop(self.work.begin, self.work.end, visit, carry)

  def _hidden(self) -> Callable:
    """Loads the masks of the rows; returns the function that hides keys."""
    launch, problem = self.launch, self.launch.problem
    if problem.visible.everything and problem.keys % launch.keys == 0:
      return lambda j, logits: logits
    end, codes = (
      None if x is None else launch.load_per_row(x, self.first)
      for x in (self.masks.end, self.masks.row_codes)
    )

    def masked(j: jax.Array, logits: jax.Array) -> jax.Array:
      key_codes = self.masks.key_codes
      if key_codes is not None:
        span = pl.ds(j * launch.keys, launch.keys)
        key_codes = launch.load_per_column(key_codes.at[self.work.batch, span])
      own = Masks(end, codes, key_codes)
      return hide(launch, logits, own, j * launch.keys, rows_axis=0)

    def hidden(j: jax.Array, logits: jax.Array) -> jax.Array:
      whole = j < self.work.whole_end
      if problem.masks_by_value:  # else all rows see the first keys
        whole &= j >= self.work.whole_begin
      return lax.cond(whole, lambda x: x, functools.partial(masked, j), logits)

    return hidden


class RowLaunch(Launch):
  """Launch of a kernel whose pieces of work are tiles of rows."""

  @property
  def row_tiles(self) -> int:
    """Tiles of rows in all blocks, P."""
    return self.problem.num_blocks * self.problem.rows // self.rows

  def table(self) -> tuple[jax.Array, jax.Array]:
    """All work [P, 7] int32, a `Work` per row, and how much is used, [1]."""
    problem = self.problem
    blocks, per_block = problem.blocks, problem.rows // self.rows
    tile = jnp.arange(self.row_tiles, dtype=jnp.int32)
    head = blocks.head[tile // per_block]
    if self.run == 2:
      first, end = (blocks.first[x] * per_block for x in (head, head + 1))
      tile = jnp.where(tile < end, alternating(first, tile, end), tile)
    kv_head = head // problem.group
    place = kv_head // problem.kv_heads, kv_head % problem.kv_heads
    bounds = (x[tile] for x in keys_of_rows(problem, self.rows, self.keys))
    table = jnp.stack([tile, *place, *bounds], -1)
    return table, blocks.first[-1:] * per_block

  def run_kernel(
    self,
    kernel: Callable,
    streamed: Arrays,
    others: Arrays,
    keys: Arrays,
    outputs: tuple,
  ) -> Arrays:
    """Launches a kernel.

    Args:
      kernel: called by each consumer for each piece of work with a `RowPart`,
        references to the tiles of the streamed arrays, the other arrays and the
        outputs.
      streamed: arrays [T * R, D] of which tiles are copied to shared memory.
      others: arrays [T * R, D] or [T * R] that stay in global memory.
      keys: keys and values.
      outputs: shapes of the results.
    """

    def over_work(table: Any, used: Any, step: Callable) -> None:
      count, index = self.mine(used[0])

      def one(m: jax.Array, done: jax.Array) -> jax.Array:
        place = index(m)
        work = Work(*(table[place, i] for i in range(len(Work._fields))))
        step(m, work, done - work.begin)
        return done + work.end - work.begin

      loop(0, count, one, jnp.int32(0))

    def consume(
      inputs: tuple, outputs: tuple, rings: tuple, group: Any, turns: Turns
    ) -> None:
      table, used, masks, _, others, _ = inputs
      rows, *key_rings = rings

      def step(m: jax.Array, work: Work, offset: jax.Array) -> None:
        part = RowPart(self, work, group, offset, masks, *key_rings, turns)
        kernel(part, rows.take(m), others, outputs)
        rows.release(m)

      over_work(table, used, step)

    def copy(inputs: tuple, rings: tuple) -> None:
      table, used, _, streamed, _, keys = inputs
      rows, *key_rings = rings

      def step(m: jax.Array, work: Work, offset: jax.Array) -> None:
        span = pl.ds(work.tile * self.rows, self.rows)
        rows.fill(m, *(x.at[span] for x in streamed))

        def copy_tile(j: jax.Array, carry: tuple) -> tuple:
          span = pl.ds(j * self.keys, self.keys)
          for ring, x in zip(key_rings, keys, strict=True):
            ring.fill(offset + j, x.at[work.batch, span, work.head])
          return carry

        loop(work.begin, work.end, copy_tile, ())

      over_work(table, used, step)

    return self.call(
      "moh" + kernel.__name__,
      consume,
      copy,
      (*self.table(), masks(self), streamed, others, keys),
      outputs,
      (
        self.ring(self.slots, *((self.rows, x) for x in streamed)),
        *(self.ring(self.tile.stages, (self.keys, one_head(x))) for x in keys),
      ),
    )


def one_head(x: jax.Array) -> jax.ShapeDtypeStruct:
  """Shape of the keys or values [B, M, K, D] of one head, [M, D]."""
  return jax.ShapeDtypeStruct((x.shape[1], x.shape[3]), x.dtype)
