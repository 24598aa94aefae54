"""Work of the Hopper kernel that holds a tile of keys and loops over the rows.

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
from moh_jax.ops.kernels.hopper_rows import one_head
from moh_jax.ops.kernels.problem import Arrays
from moh_jax.ops.kernels.triton_tables import Bounds, rows_of_keys


class Work(NamedTuple):
  """A tile of the keys of a key/value head; numbers."""

  tile: Any
  batch: Any
  head: Any


@dataclasses.dataclass(frozen=True)
class KeyPart:
  """A consumer's part of a piece of work.

  Attributes:
    launch: the kernel.
    work: the piece.
    consumer: number of the consumer.
    offset: steps that were done in the rings before.
    bounds: references to the bounds of `rows_of_keys`.
    masks: references.
    rows: ring of the rows.
    turns: of the consumers.
  """

  launch: "KeyLaunch"
  work: Work
  consumer: Any
  offset: Any
  bounds: Bounds
  masks: Masks
  rows: Ring
  turns: Turns

  @property
  def start(self) -> jax.Array:
    """Where the part's keys begin in a tile."""
    return 0 if self.launch.shares_keys else self.consumer * PART

  def own(self, tile: Any) -> Any:
    """The part's keys of a tile in shared memory."""
    return tile.at[pl.ds(self.start, PART)]

  def place(self, x: Any) -> Any:
    """The part's keys of an array [B, M, K, D] in global memory."""
    first = self.work.tile * self.launch.keys + self.start
    return x.at[self.work.batch, pl.ds(first, PART), self.work.head]

  def over_rows(self, step: Callable, carry: Any) -> tuple[jax.Array, Any]:
    """Loops over the tiles of rows.

    Args:
      step: (turn, hide, carry) -> carry, where turn is the step in the rings
        and `hide` sets hidden logits [PART, r] to -inf.
      carry: its first value.

    Returns:
      The steps that are done in the rings, and the last carry.
    """

    def visit(turn: Any, i: Any, whole: Any, carry: Any) -> Any:
      return step(turn, functools.partial(self._hidden, i, whole), carry)

    return self.launch.over_rows(
      self.work, self.bounds, self.offset, visit, carry
    )

  def _hidden(
    self, i: jax.Array, whole: jax.Array, logits: jax.Array
  ) -> jax.Array:
    """Hides keys from the rows of tile i, unless all see the whole tile."""
    launch = self.launch
    # Gradients of keys beyond the last are not stored, so nothing hides them.
    if launch.problem.visible.everything:
      return logits

    def masked(logits: jax.Array) -> jax.Array:
      span = pl.ds(i * launch.rows, launch.rows)
      by_row = (
        None if x is None else launch.load_per_column(x.at[span])
        for x in (self.masks.end, self.masks.row_codes)
      )
      first = self.work.tile * launch.keys + self.start
      key_codes = self.masks.key_codes
      if key_codes is not None:
        key_codes = key_codes.at[self.work.batch]
        key_codes = launch.load_per_row(key_codes, first)
      own = Masks(*by_row, key_codes)
      return hide(launch, logits, own, first, rows_axis=1)

    return lax.cond(whole, lambda x: x, masked, logits)


class KeyLaunch(Launch):
  """Launch of the kernel whose pieces of work are tiles of keys."""

  @property
  def shares_keys(self) -> bool:
    """Whether each consumer computes one gradient of all keys of the tile.

    The registers of one do not hold both gradients of a large head dim.
    """
    return self.keys == PART

  def table(self) -> jax.Array:
    """All work [B * K * J, 3] int32, a `Work` per row."""
    problem = self.problem
    tile = jnp.arange(self.key_tiles, dtype=jnp.int32)
    if self.run == 2:
      tile = alternating(0, tile, self.key_tiles)
    heads = jnp.arange(problem.batch * problem.kv_heads, dtype=jnp.int32)
    shape = len(heads), len(tile)
    columns = tile, heads[:, None] // problem.kv_heads
    columns = *columns, heads[:, None] % problem.kv_heads
    columns = [jnp.broadcast_to(x, shape).reshape(-1) for x in columns]
    return jnp.stack(columns, -1)

  def over_rows(
    self, work: Work, bounds: Bounds, done: Any, visit: Callable, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Loops over the tiles of rows of the query heads that read a tile of keys.

    Args:
      work: the tile of keys.
      bounds: references.
      done: steps done in the rings before.
      visit: (turn, i, whole, carry) -> carry for tile i of the rows, where turn
        is the step in the rings; `whole` tells that all rows see all keys.
      carry: its first value.

    Returns:
      The steps that are done, and the last carry.
    """
    head = (work.batch * self.problem.kv_heads + work.head) * self.problem.group

    def over_query_head(g: jax.Array, carry: tuple) -> tuple:
      own = Bounds(*(x[head + g, work.tile] for x in bounds))

      def one(i: jax.Array, carry: tuple) -> tuple:
        turn, carry = carry
        whole = i >= own.whole_begin
        if self.problem.masks_by_value:  # else the last rows see all keys
          whole &= i < own.whole_end
        return turn + 1, visit(turn, i, whole, carry)

      return loop(own.begin, own.end, one, carry)

    return loop(0, self.problem.group, over_query_head, (done, carry))

  def run_kernel(self, kernel: Callable, rows: Arrays, keys: Arrays) -> Arrays:
    """Launches the kernel.

    Args:
      kernel: called by each consumer for each piece of work with a `KeyPart`,
        references to the tiles of keys and values, and the outputs; it returns
        the steps that are done in the rings.
      rows: rows [T * R, D] and numbers [T * R].
      keys: keys and values; the outputs have their shapes and dtypes.
    """
    pieces = self.problem.batch * self.problem.kv_heads * self.key_tiles

    def over_work(table: Any, step: Callable) -> None:
      count, index = self.mine(pieces)

      def one(m: jax.Array, done: jax.Array) -> jax.Array:
        place = index(m)
        work = Work(*(table[place, i] for i in range(len(Work._fields))))
        return step(m, work, done)

      loop(0, count, one, jnp.int32(0))

    def consume(
      inputs: tuple, outputs: tuple, rings: tuple, group: Any, turns: Turns
    ) -> None:
      table, bounds, masks, *_ = inputs
      tiles, row_ring = rings

      def step(m: jax.Array, work: Work, done: jax.Array) -> jax.Array:
        part = KeyPart(self, work, group, done, bounds, masks, row_ring, turns)
        done = kernel(part, tiles.take(m), outputs)
        tiles.release(m)
        return done

      over_work(table, step)

    def copy(inputs: tuple, rings: tuple) -> None:
      table, bounds, _, rows, keys = inputs
      tiles, row_ring = rings

      def step(m: jax.Array, work: Work, done: jax.Array) -> jax.Array:
        span = pl.ds(work.tile * self.keys, self.keys)
        tiles.fill(m, *(x.at[work.batch, span, work.head] for x in keys))

        def copy_tile(turn: Any, i: Any, whole: Any, carry: tuple) -> tuple:
          del whole
          span = pl.ds(i * self.rows, self.rows)
          row_ring.fill(turn, *(x.at[span] for x in rows))
          return carry

        return self.over_rows(work, bounds, done, copy_tile, ())[0]

      over_work(table, step)

    bounds = rows_of_keys(self.problem, self.rows, self.keys)
    # Copies leave out what is beyond an array's end; the interpreter's do not.
    more = self.key_tiles * self.keys - self.problem.keys
    pad = (0, more if self.problem.interpret else 0)
    outputs = jax.eval_shape(
      lambda: tuple(jnp.pad(x, ((0, 0), pad, (0, 0), (0, 0))) for x in keys)
    )
    results = self.call(
      "moh" + kernel.__name__,
      consume,
      copy,
      (self.table(), bounds, masks(self), rows, keys),
      outputs,
      (
        self.ring(1, *((self.keys, one_head(x)) for x in keys)),
        self.ring(self.tile.stages, *((self.rows, x) for x in rows)),
      ),
    )
    return tuple(x[:, : self.problem.keys] for x in results)
