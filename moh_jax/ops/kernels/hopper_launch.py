"""How the Hopper kernels are launched: tables, arguments, warpgroups.

The grid is as large as the GPU: a program takes one piece of work after the
other, and its copies for the next piece run while it finishes the last.

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.hopper_program import (
  PART,
  Program,
  Ring,
  RingType,
  loop,
  spread,
)
from moh_jax.ops.kernels.problem import Arrays
from moh_jax.ops.kernels.triton_tables import keys_of_rows, rows_of_keys
from moh_jax.ops.target import target

# Registers of a thread of the consumers and of the warpgroup that copies, where
# two consumers share a multiprocessor with it.
_REGISTERS = 240, 24


class Work(NamedTuple):
  """A tile of rows and the tiles of keys that it reads; numbers."""

  tile: Any
  batch: Any
  head: Any
  begin: Any
  whole_begin: Any
  whole_end: Any
  end: Any

  def is_whole(self, j: jax.Array) -> jax.Array:
    """Whether all rows see all keys of tile j."""
    return (j >= self.whole_begin) & (j < self.whole_end)


class Masks(NamedTuple):
  """What hides keys; None where nothing of the kind does.

  A row sees a key of [begin, end) if their codes are equal.

  Attributes:
    begin: [T * R] int32, the first key of each row.
    end: [T * R] int32, the end of the keys of each row.
    row_codes: [T * R] int32.
    key_codes: [B, J * L] int32.
  """

  begin: Any = None
  end: Any = None
  row_codes: Any = None
  key_codes: Any = None


@dataclasses.dataclass(frozen=True)
class Launch(Program):
  """Launch of one kernel of one call; attributes as those of `Program`."""

  @property
  def consumers(self) -> int:
    """Warpgroups that compute."""
    return self.rows // PART

  @property
  def row_tiles(self) -> int:
    """Tiles of rows in all blocks, P."""
    return self.problem.num_blocks * self.problem.rows // self.rows

  @property
  def run(self) -> int:
    """Pieces of work that a program takes at a time.

    Causal attention has one long and one short piece follow each other.
    """
    return 2 if self.problem.visible.causal else 1

  def masks(self) -> Masks:
    """What hides keys from rows."""
    problem = self.problem
    if not (problem.visible.causal or problem.masks_by_value):
      return Masks()
    ranges = problem.row_ranges()
    end = ranges.end.reshape(-1)
    if not problem.masks_by_value:
      return Masks(end=end)
    key_codes, row_codes = problem.visible.segments, problem.row_masks()[1]
    if key_codes is None:
      key_codes = jnp.zeros((problem.batch, problem.keys), jnp.int32)
      row_codes = jnp.zeros_like(end)
    if problem.visible.key_mask is not None:
      hidden = jnp.iinfo(jnp.int32).min
      key_codes = jnp.where(problem.visible.key_mask, key_codes, hidden)
    more = self.key_tiles * self.keys - problem.keys
    key_codes = jnp.pad(key_codes, ((0, 0), (0, more)))
    return Masks(ranges.begin.reshape(-1), end, row_codes, key_codes)

  def row_table(self) -> tuple[jax.Array, jax.Array]:
    """All work by tiles of rows [P, 7] int32, in order, and how much is used.

    A row of the table is a `Work`; the second array has the shape [1].
    """
    problem = self.problem
    blocks, per_block = problem.blocks, problem.rows // self.rows
    tile = jnp.arange(self.row_tiles, dtype=jnp.int32)
    head = blocks.head[tile // per_block]
    if self.run == 2:
      first, end = (
        blocks.first[x] * per_block for x in (head, head + 1)
      )
      tile = jnp.where(tile < end, _alternating(first, tile, end), tile)
    kv_head = head // problem.group
    batch, kv_head = kv_head // problem.kv_heads, kv_head % problem.kv_heads
    bounds = keys_of_rows(problem, self.rows, self.keys)
    bounds = (x[tile] for x in bounds)
    table = jnp.stack([tile, batch, kv_head, *bounds], -1)
    return table, blocks.first[-1:] * per_block

  def mine(self, program: jax.Array, used: jax.Array) -> tuple:
    """How many pieces of work a program has, and the function that finds them.

    Args:
      program: its number.
      used: pieces of all programs.

    Returns:
      The number, and the function from 0, 1, ... to the index in the table.
    """
    stride = self.run * programs()
    left = jnp.maximum(used - self.run * program, 0)
    count = lax.div(left, stride) * self.run
    count += jnp.minimum(lax.rem(left, stride), self.run)

    def index(m: jax.Array) -> jax.Array:
      start = self.run * program + lax.div(m, self.run) * stride
      return start + lax.rem(m, self.run)

    return count, index

  def by_rows(
    self,
    consume: Callable,
    streamed: Arrays,
    others: Arrays,
    keys: Arrays,
    outputs: tuple,
    *,
    in_turns: bool = False,
  ) -> Arrays:
    """Launches a kernel whose pieces of work are tiles of rows.

    Args:
      consume: the kernel, called by each consumer for each piece of work with
        the launch, a `RowWork`, references to the streamed tiles and to the
        other arrays and outputs.
      streamed: arrays [T * R, D] of which tiles are copied to shared memory.
      others: arrays [T * R, D] or [T * R] that stay in global memory.
      keys: keys and values.
      outputs: shapes of the results.
      in_turns: whether the kernel calls `Turns.switch` twice per tile of keys.
    """
    table, used = self.row_table()
    inputs = table, used, self.masks(), streamed, others, keys
    dim = self.problem.head_dim
    tile = lambda n, x: jax.ShapeDtypeStruct((n, dim), x.dtype)  # noqa: E731
    rings = (
      RingType(self.slots, tuple(tile(self.rows, x) for x in streamed)),
      *(RingType(self.tile.stages, (tile(self.keys, x),)) for x in keys),
    )

    def body(inputs: tuple, outputs: tuple, rings: tuple, turns: Any) -> None:
      table, used, masks, streamed, others, keys = inputs
      count, index = self.mine(lax.axis_index("program"), used[0])
      group = lax.axis_index("warpgroup")
      rows, *key_rings = rings

      def over_work(step: Callable) -> None:
        def one(m: jax.Array, done: jax.Array) -> jax.Array:
          work = Work(*(table[index(m), i] for i in range(len(Work._fields))))
          step(m, work, done)
          return done + work.end - work.begin

        loop(0, count, one, jnp.int32(0))

      @pl.when(group < self.consumers)
      def _() -> None:
        self.set_registers(consumer=True)
        for ring in rings:
          ring.open()
        turns.start(group)

        def step(m: jax.Array, work: Work, done: jax.Array) -> None:
          part = RowWork(work, group, done - work.begin, masks, key_rings, turns)
          tiles = rows.take(m)
          consume(self, part, tiles, others, outputs)
          rows.release(m)

        over_work(step)
        turns.stop(group)

      @pl.when(group == self.consumers)
      def _() -> None:
        self.set_registers(consumer=False)

        def step(m: jax.Array, work: Work, done: jax.Array) -> None:
          span = pl.ds(work.tile * self.rows, self.rows)
          rows.fill(m, *(x.at[span] for x in streamed))

          def copy(j: jax.Array, carry: tuple) -> tuple:
            span = pl.ds(j * self.keys, self.keys)
            for ring, x in zip(key_rings, keys):
              source = x.at[work.batch, span, work.head]
              ring.fill(done + j - work.begin, source)
            return carry

          loop(work.begin, work.end, copy, ())

        over_work(step)
        for ring in rings:
          ring.close()

    in_turns &= self.consumers > 1
    return self._call(body, consume.__name__, inputs, outputs, rings, in_turns)

  def hide_from_rows(self, part: "RowWork", first: jax.Array) -> Callable:
    """Returns the function that hides keys from a consumer's rows.

    Args:
      part: the consumer's work.
      first: the first of its rows.

    Returns:
      From logits [PART, L] and j, the tile of keys, to the logits with -inf
      where a row does not see a key.
    """
    visible = self.problem.visible
    if visible.everything and self.problem.keys % self.keys == 0:
      return lambda logits, j: logits
    load = functools.partial(self.load_per_row, first=first)
    masks = part.masks
    begin, end, codes = jax.tree.map(load, tuple(masks[:3]))

    def hide(logits: jax.Array, j: jax.Array) -> jax.Array:
      key_codes = None
      if codes is not None:
        span = pl.ds(j * self.keys, self.keys)
        key_codes = masks.key_codes.at[part.work.batch, span]
        key_codes = self.load_per_column(key_codes)
      own = Masks(begin, end, codes, key_codes)
      return self.hide(logits, own, j * self.keys, rows_axis=0)

    return lambda logits, j: lax.cond(
      part.work.is_whole(j), lambda x: x, lambda x: hide(x, j), logits
    )

  def hide(
    self, logits: jax.Array, masks: Masks, first: jax.Array, *, rows_axis: int
  ) -> jax.Array:
    """Sets logits to -inf where a row does not see a key.

    Args:
      logits: [X, Y].
      masks: arrays in registers, of the rows and keys of the logits.
      first: the first of the keys.
      rows_axis: 0 or 1, which axis are the rows.
    """
    shape = logits.shape
    by_row = functools.partial(spread, shape=shape, axis=rows_axis)
    by_key = functools.partial(spread, shape=shape, axis=1 - rows_axis)
    key = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    key = self.as_matrix(key) + first
    end = self.problem.keys if masks.end is None else by_row(masks.end)
    seen = key < end
    if masks.begin is not None:
      seen &= key >= by_row(masks.begin)
    if masks.row_codes is not None:
      seen &= by_row(masks.row_codes) == by_key(masks.key_codes)
    return jnp.where(seen, logits, -jnp.inf)

  def set_registers(self, *, consumer: bool) -> None:
    """Gives registers of the copying warpgroup to the consumers."""
    if self.consumers == 1:  # there are enough
      return
    more, fewer = _REGISTERS
    if consumer:
      plgpu.set_max_registers(more, action="increase")
    else:
      plgpu.set_max_registers(fewer, action="decrease")

  @property
  def slots(self) -> int:
    """Tiles of rows in shared memory: the next one beside that in use."""
    return 2 if self.problem.head_dim <= 128 else 1

  def _call(
    self,
    body: Callable,
    name: str,
    inputs: Any,
    outputs: tuple,
    rings: tuple[RingType, ...],
    in_turns: bool,
  ) -> Arrays:
    """Launches a body of (inputs, outputs, rings, turns)."""
    arrays, tree = jax.tree.flatten(inputs)

    def flat(*references: Any) -> None:
      *references, buffers, barriers = references
      ins, outs = references[: len(arrays)], references[len(arrays) :]
      places = tuple(Ring(*x) for x in buffers)
      body(jax.tree.unflatten(tree, ins), tuple(outs), places, Turns(barriers))

    flat.__name__ = "moh" + name
    turns = plgpu.Barrier(num_arrivals=self.consumers) if in_turns else None
    call = plgpu.kernel(
      flat,
      out_type=outputs,
      scratch_types=(tuple(x.scratch(self.consumers) for x in rings), turns),
      compiler_params=plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
      ),
      grid=(programs(),),
      grid_names=("program",),
      num_threads=self.consumers + 1,
      thread_name="warpgroup",
      interpret=_interpreter() if self.problem.interpret else None,
    )
    return tuple(call(*arrays))


class Turns(NamedTuple):
  """Lets two consumers take turns at the tensor cores.

  One computes products while the other one computes exponentials.

  Attributes:
    barrier: at which both arrive; None if there are no turns.
  """

  barrier: Any

  def switch(self) -> None:
    """Waits until the other consumer has come to its next switch."""
    if self.barrier is not None:
      plgpu.barrier_arrive(self.barrier)
      plgpu.barrier_wait(self.barrier)

  def start(self, consumer: jax.Array) -> None:
    """Puts the second consumer half a turn behind the first."""
    if self.barrier is not None:
      pl.when(consumer == 1)(self.switch)

  def stop(self, consumer: jax.Array) -> None:
    """Evens out the number of switches."""
    if self.barrier is not None:
      pl.when(consumer == 0)(self.switch)


class RowWork(NamedTuple):
  """A consumer's part of a piece of work.

  Attributes:
    work: the piece.
    consumer: number of the consumer.
    offset: what turns the index of a tile of keys into its step in the rings.
    masks: references.
    rings: of keys and values.
    turns: of the consumers.
  """

  work: Work
  consumer: Any
  offset: Any
  masks: Masks
  rings: tuple[Ring, Ring]
  turns: Turns


def programs() -> int:
  """Multiprocessors of the GPU that a function is traced for."""
  kind = target().kind
  if "H20" in kind.replace("H200", ""):
    return 78
  return 114 if "H100 PCIe" in kind else 132


def _alternating(
  first: jax.Array, position: jax.Array, end: jax.Array
) -> jax.Array:
  """Orders [first, end): the last, the first, the last but one, the second."""
  half, odd = jnp.divmod(position - first, 2)
  return jnp.where(odd == 1, first + half, end - 1 - half)


def _interpreter() -> Any:
  """Parameters that make Pallas simulate the warpgroups and barriers."""
  # JAX 0.10 has them in a private module only.
  params = plgpu
  if not hasattr(plgpu, "InterpretGPUParams"):
    from jax._src.pallas.mosaic_gpu.interpret import params
  # Copies fill what is beyond the end of an array with zeros.
  return params.InterpretGPUParams(
    out_of_bounds_reads="uninitialized", uninitialized_memory="zero"
  )
