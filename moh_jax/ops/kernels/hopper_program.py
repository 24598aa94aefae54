"""Launch of the Hopper kernels, and what their warpgroups share.

A program is a few warpgroups of 128 threads: consumers, which compute, and one
that does nothing but copy tiles from global to shared memory (TMA), ahead of
the consumers. Tiles go through rings of slots in shared memory, with two
barriers per slot: "ready", which a copy completes, and "free", at which every
consumer arrives once it has read the slot.

The grid is as large as the GPU: a program takes one piece of work after the
other, and its copies for the next piece run while it finishes the last.

Shapes as in `hopper`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.attention import Arrays, Problem, Tile, across, times
from moh_jax.ops.target import target, vary_alike

# Rows of a consumer's part of a tile: what one product instruction takes.
PART = 64
# Layouts of arrays in the registers of a warpgroup.
MATRIX = plgpu.Layout.WGMMA  # as the results of products
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
# Registers of a thread of the consumers and of the warpgroup that copies, where
# two consumers share a multiprocessor with it.
_REGISTERS = 240, 24
_CORES = 132  # multiprocessors of an H100 or H200, where JAX does not tell
# JAX 0.10 demands an index, JAX 0.11 deprecates it.
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()


@dataclasses.dataclass(frozen=True)
class Ring:
  """Slots of shared memory that are filled and read in turn.

  Attributes:
    buffers: references [slots, ...], filled together.
    ready: barriers, one per slot.
    free: barriers, one per slot.
  """

  buffers: tuple
  ready: Any
  free: Any

  def slot(self, step: jax.Array) -> jax.Array:
    """The slot of the step-th tile."""
    return lax.rem(step, jnp.int32(self.buffers[0].shape[0]))

  def fill(self, step: jax.Array, *sources: Any) -> None:
    """Waits until the slot is free, then starts to copy the step-th tile."""
    slot = self.slot(step)
    plgpu.barrier_wait(self.free.at[slot])
    for source, buffer in zip(sources, self.buffers, strict=True):
      plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.ready.at[slot])

  def take(self, step: jax.Array) -> tuple:
    """Waits for the step-th tile and returns references to its buffers."""
    slot = self.slot(step)
    plgpu.barrier_wait(self.ready.at[slot])
    return tuple(x.at[slot] for x in self.buffers)

  def release(self, step: jax.Array) -> None:
    """Tells that this consumer has read the step-th tile."""
    plgpu.barrier_arrive(self.free.at[self.slot(step)])

  def open(self) -> None:
    """Tells that all slots are free, before the first tile."""
    for slot in range(self.buffers[0].shape[0]):
      plgpu.barrier_arrive(self.free.at[slot])

  def close(self) -> None:
    """Waits until all slots are free, after the last copy."""
    for slot in range(self.buffers[0].shape[0]):
      plgpu.barrier_wait(self.free.at[slot])


def _shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
  """Type of a buffer [slots, ...] in shared memory."""
  if len(shape) < 3:
    return plgpu.SMEM(shape, dtype)
  bits = jnp.dtype(dtype).itemsize * 8
  swizzle = plgpu.find_swizzle(shape[-1] * bits)
  transforms = (
    plgpu.TilingTransform((8, 8 * swizzle // bits)),
    plgpu.SwizzleTransform(swizzle),
  )
  return plgpu.SMEM(shape, dtype, transforms=transforms)


class Masks(NamedTuple):
  """What hides keys; None where nothing of the kind does.

  A row sees the keys before its end that have its code.

  Attributes:
    end: [T * R] int32, where the keys of each row end; None is M.
    row_codes: [T * R] int32.
    key_codes: [B, J * L] int32.
  """

  end: Any = None
  row_codes: Any = None
  key_codes: Any = None


class Work(NamedTuple):
  """A piece of work; numbers.

  Attributes:
    tile: the tile of rows, or of the keys of a key/value head.
    batch: of the keys.
    head: key/value head of the keys.
    begin: of the tiles of the other kind that it meets: as in `Ranges`.
    whole_begin: as in `Ranges`.
    whole_end: as in `Ranges`.
    end: as in `Ranges`.
  """

  tile: Any
  batch: Any
  head: Any
  begin: Any
  whole_begin: Any
  whole_end: Any
  end: Any


@dataclasses.dataclass(frozen=True)
class Part:
  """A consumer's part of a piece of work.

  Attributes:
    launch: the kernel.
    work: the piece.
    consumer: number of the consumer.
    done: steps that were done in the rings before.
    masks: references.
    rings: of what the piece loops over.
    barrier: at which all consumers arrive; None for a single one.
  """

  launch: "Launch"
  work: Work
  consumer: Any
  done: Any
  masks: Masks
  rings: list[Ring]
  barrier: Any

  @property
  def start(self) -> jax.Array:
    """Where the part begins in a tile that the piece holds."""
    return 0 if self.launch.shares_keys else self.consumer * PART

  def own(self, tile: Any) -> Any:
    """The part's rows or keys of a tile in shared memory."""
    return tile.at[pl.ds(self.start, PART)]

  def switch(self) -> None:
    """Waits until the other consumers have come to their next switch."""
    if self.barrier is not None:
      plgpu.barrier_arrive(self.barrier)
      plgpu.barrier_wait(self.barrier)

  def over_tiles(self, step: Callable, carry: Any) -> tuple[jax.Array, Any]:
    """Loops over the tiles that are streamed.

    Args:
      step: (turn, hide, carry) -> carry, where turn is the step in the rings
        and `hide` sets hidden logits to -inf: [PART, L] of a part of rows,
        [PART, r] of a part of keys.
      carry: its first value.

    Returns:
      The steps that are done in the rings, and the last carry.
    """
    launch, hidden = self.launch, self.launch.hidden(self)

    def visit(turn: Any, i: Any, carry: Any) -> Any:
      return step(turn, functools.partial(hidden, i), carry)

    return launch.over_tiles(self.work, self.done, visit, carry)


@dataclasses.dataclass(frozen=True)
class Launch:
  """One kernel of one call: its launch, and the steps its programs share.

  What differs between tiles of rows and of keys is in the two classes below it:
  the table of all work, and `masked`.

  Attributes:
    problem: the call.
    tile: sizes.
    consumers: warpgroups that compute.
  """

  problem: Problem
  tile: Tile
  consumers: int
  shares_keys = False

  rows = property(lambda self: self.tile.rows)  # r
  keys = property(lambda self: self.tile.keys)  # L

  @property
  def key_tiles(self) -> int:
    """Tiles of keys, J; the last may have fewer than L keys."""
    return pl.cdiv(self.problem.keys, self.keys)

  def weights(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
    """exp2(logits * log2_scale - shift)."""
    return jnp.exp2(logits * self.problem.log2_scale - shift)

  def across(self, a: Any, b: Any, meanwhile: Callable = lambda: None) -> Any:
    """Multiplies [X, D] with [Y, D] in shared memory to [X, Y] float32.

    Args:
      a: reference to rows.
      b: reference to rows.
      meanwhile: called between the start of the product and its end.
    """
    if self.problem.interpret:
      meanwhile()
      return across(a[...], b[...])

    def start(total: Any) -> jax.Array:
      plgpu.wgmma(total, a, b.transpose((1, 0)))
      meanwhile()
      return total[...]

    shape = a.shape[0], b.shape[0]
    return pl.run_scoped(start, plgpu.ACC(shape, jnp.float32))

  def across_both(self, first: tuple, then: Callable, second: tuple) -> tuple:
    """Two products as those of `across`; the second runs during `then`.

    It runs afterwards where masks or accumulators take the registers that it
    would need.

    Args:
      first: references of the first product.
      then: called with the first product.
      second: references of the second product.

    Returns:
      The result of `then` and the second product.
    """
    problem = self.problem
    crowded = problem.masks_by_value or problem.head_dim > 128
    if problem.interpret or crowded:
      return then(self.across(*first)), self.across(*second)

    def start(a: Any, b: Any) -> tuple:
      for total, (left, right) in ((a, first), (b, second)):
        plgpu.wgmma(total, left, right.transpose((1, 0)))
      result = then(plgpu.wgmma_accumulator_load(a, wait_n=1))
      return result, b[...]

    shapes = ((x.shape[0], y.shape[0]) for x, y in (first, second))
    return pl.run_scoped(start, *(plgpu.ACC(x, jnp.float32) for x in shapes))

  def add_product(
    self, total: jax.Array, weights: jax.Array, rows: Any
  ) -> jax.Array:
    """Adds weights [X, Y] times rows [Y, D] in shared memory to [X, D]."""
    if self.problem.interpret:
      return total + times(weights, rows[...])

    def start(total: Any) -> None:
      plgpu.wgmma(total, weights, rows)

    return pl.run_state(start)(plgpu.ACC.init(total))

  def add_across(self, total: jax.Array, a: Any, b: Any) -> jax.Array:
    """Adds the product of `across` to an array [X, Y] in registers."""
    if self.problem.interpret:
      return total + self.across(a, b)

    def start(total: Any) -> None:
      plgpu.wgmma(total, a, b.transpose((1, 0)))

    return pl.run_state(start)(plgpu.ACC.init(total))

  def full(self, value: float, *columns: int) -> jax.Array:
    """A number for each of a consumer's rows, [PART, *columns] float32."""
    layout = MATRIX if columns else PER_ROW
    return self.laid_out(jnp.full((PART, *columns), value, jnp.float32), layout)

  def laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
    """Spreads an array over the registers."""
    return x if self.problem.interpret else plgpu.layout_cast(x, layout)

  def load(self, x: Any, layout: Any) -> jax.Array:
    """Loads a matrix, or a number per row or column of the logits."""
    if self.problem.interpret:
      return x[...]
    return plgpu.load(x, *_WHOLE, layout=layout, optimized=False)

  def over_tiles(
    self, work: Work, done: Any, visit: Callable, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Loops over the tiles that a piece of work meets.

    Args:
      work: the piece.
      done: steps done in the rings before.
      visit: (turn, i, carry) -> carry for the i-th of all tiles, where turn is
        the step in the rings.
      carry: its first value.

    Returns:
      The steps that are done, and the last carry.
    """
    offset = done - work.begin

    def one(i: jax.Array, carry: Any) -> Any:
      return visit(offset + i, i, carry)

    carry = loop(work.begin, work.end, one, carry)
    return done + work.end - work.begin, carry

  def masked(self, part: Part) -> Callable | None:
    """The function that hides keys from the rows of a tile; None if none are.

    Args:
      part: whose logits they are.

    Returns:
      (i, logits) -> logits, for the i-th of the tiles that are streamed.
    """
    raise NotImplementedError

  def hidden(self, part: Part) -> Callable:
    """As `masked`, for all tiles: those whose rows see all keys skip it."""
    masked, work = self.masked(part), part.work
    if masked is None:
      return lambda i, logits: logits

    def hidden(i: jax.Array, logits: jax.Array) -> jax.Array:
      whole = (i >= work.whole_begin) & (i < work.whole_end)
      return lax.cond(whole, lambda x: x, functools.partial(masked, i), logits)

    return hidden

  # The launch.

  @property
  def run(self) -> int:
    """Pieces of work that a program takes at a time.

    Causal attention has one long and one short piece follow each other.
    """
    return 2 if self.problem.visible.causal else 1

  @property
  def programs(self) -> int:
    """Programs of the grid."""
    # The interpreter runs one after the other: two show how they share work.
    return 2 if self.problem.interpret else target().cores or _CORES

  def _over_work(self, table: Any, used: Any, step: Callable) -> None:
    """Does this program's pieces of work, one after the other.

    Args:
      table: reference to all work, [pieces, 7] int32.
      used: reference to the number of pieces, [1]; None is all.
      step: (m, work, done) -> (done, finish) for the m-th of its pieces, where
        done is the number of steps that are done in the rings of a loop, and
        `finish` is called afterwards.
    """
    pieces = table.shape[0] if used is None else used[0]
    program = lax.axis_index("program") * self.run
    stride = self.run * self.programs
    left = jnp.maximum(pieces - program, 0)
    count = lax.div(left, stride) * self.run
    count += jnp.minimum(lax.rem(left, stride), self.run)

    def load(m: jax.Array) -> Work:
      place = program + lax.div(m, self.run) * stride + lax.rem(m, self.run)
      place = jnp.minimum(place, table.shape[0] - 1)
      return Work(*(table[place, i] for i in range(table.shape[1])))

    def one(m: jax.Array, carry: tuple) -> tuple:
      work, done = carry
      done, finish = step(m, work, done)
      # Read here, so that the next piece does not wait for global memory; not
      # before the step, whose loop needs all registers.
      work = load(m + 1)
      finish()
      return work, done

    loop(0, count, one, (load(jnp.int32(0)), jnp.int32(0)))

  def _ring(self, slots: int, arrays: Arrays) -> tuple:
    """Types of the arguments of `Ring`; one copy fills each buffer of a slot.

    Args:
      slots: number of slots.
      arrays: of which a slot holds a tile each: rows, or keys and values.
    """
    buffers = tuple(
      _shared(
        (slots, self.keys, x.shape[3])
        if x.ndim == 4
        else (slots, self.rows, *x.shape[1:]),
        x.dtype,
      )
      for x in arrays
    )
    ready, free = (
      plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
      for arrivals in (len(buffers), self.consumers)
    )
    return buffers, ready, free

  def _tile(self, x: Any, work: Work, i: Any) -> Any:
    """The i-th tile of rows [T * R, ...], or of keys [B, M, K, D]."""
    if len(x.shape) < 4:
      return x.at[pl.ds(i * self.rows, self.rows)]
    return x.at[work.batch, pl.ds(i * self.keys, self.keys), work.head]

  def run_kernel(
    self,
    kernel: Callable,
    pieces: tuple,
    held: Arrays,
    slots: int,
    streams: Sequence[Arrays],
    others: Arrays,
    outputs: tuple,
  ) -> Arrays:
    """Launches a kernel.

    Args:
      kernel: called by each consumer for each piece of work with a `Part`,
        references to the tiles that the piece holds, the other arrays and the
        outputs; it returns the steps that are done in the rings, and a function
        that stores the results.
      pieces: all work [pieces, 7] int32, a `Work` per row; and how much of it
        is used, [1], or None for all.
      held: rows, or keys and values, of which a piece holds one tile.
      slots: tiles of these in shared memory: the next ones too.
      streams: for each ring, the arrays whose tiles a piece loops over.
      others: arrays that stay in global memory.
      outputs: shapes of the results.
    """
    inputs = (*pieces, masks(self), held, streams, others)
    arrays, tree = jax.tree.flatten(inputs)
    rings = (
      self._ring(slots, held),
      *(self._ring(self.tile.stages, x) for x in streams),
    )

    def body(*references: Any) -> None:
      *references, buffers, barrier = references
      table, used, masks, held, streams, others = jax.tree.unflatten(
        tree, references[: len(arrays)]
      )
      outputs = references[len(arrays) :]
      tiles, *rings = (Ring(*x) for x in buffers)
      group = lax.axis_index("warpgroup")

      def compute(m: jax.Array, work: Work, done: jax.Array) -> tuple:
        part = Part(self, work, group, done, masks, rings, barrier)
        done, store = kernel(part, tiles.take(m), others, outputs)

        def finish() -> None:
          store()
          tiles.release(m)

        return done, finish

      def copy(m: jax.Array, work: Work, done: jax.Array) -> tuple:
        tiles.fill(m, *(self._tile(x, work, work.tile) for x in held))

        def copy_tile(turn: Any, i: Any, carry: tuple) -> tuple:
          for ring, xs in zip(rings, streams, strict=True):
            ring.fill(turn, *(self._tile(x, work, i) for x in xs))
          return carry

        return self.over_tiles(work, done, copy_tile, ())[0], lambda: None

      @pl.when(group < self.consumers)
      def _() -> None:
        self._set_registers(_REGISTERS[0], "increase")
        for ring in (tiles, *rings):
          ring.open()
        self._over_work(table, used, compute)

      @pl.when(group == self.consumers)
      def _() -> None:
        self._set_registers(_REGISTERS[1], "decrease")
        self._over_work(table, used, copy)
        for ring in (tiles, *rings):
          ring.close()

    body.__name__ = "moh" + kernel.__name__
    barrier = plgpu.Barrier(num_arrivals=self.consumers)
    launch = plgpu.kernel(
      body,
      out_type=outputs,
      scratch_types=(rings, barrier if self.consumers > 1 else None),
      compiler_params=plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
      ),
      grid=(self.programs,),
      grid_names=("program",),
      num_threads=self.consumers + 1,
      thread_name="warpgroup",
      interpret=_interpreter() if self.problem.interpret else None,
    )
    return vary_alike(tuple(launch(*arrays)), arrays)

  def _set_registers(self, number: int, action: str) -> None:
    if self.consumers > 1:  # else there are enough for all
      plgpu.set_max_registers(number, action=action)


def masks(launch: Launch) -> Masks:
  """What hides keys from the rows of a call."""
  problem = launch.problem
  last, row_codes = problem.row_masks()
  end = None if last is None else last + 1
  if not problem.masks_by_value:
    return Masks(end)
  key_codes = problem.visible.segments
  if key_codes is None:
    key_codes = jnp.zeros((problem.batch, problem.keys), jnp.int32)
    row_codes = jnp.zeros(problem.num_blocks * problem.rows, jnp.int32)
  hidden = jnp.iinfo(jnp.int32).min
  if problem.visible.key_mask is not None:
    key_codes = jnp.where(problem.visible.key_mask, key_codes, hidden)
  more = launch.key_tiles * launch.keys - problem.keys
  key_codes = jnp.pad(key_codes, ((0, 0), (0, more)), constant_values=hidden)
  return Masks(end, row_codes, key_codes)


def hide(
  launch: Launch,
  logits: jax.Array,
  masks: Masks,
  first: jax.Array,
  *,
  rows_axis: int,
) -> jax.Array:
  """Sets logits to -inf where a row does not see a key.

  Args:
    launch: the kernel.
    logits: [X, Y].
    masks: arrays in registers, for the rows and keys of the logits.
    first: the first of the keys.
    rows_axis: 0 or 1, which axis are the rows.
  """
  shape = logits.shape
  by_row = functools.partial(spread, shape=shape, axis=rows_axis)
  by_key = functools.partial(spread, shape=shape, axis=1 - rows_axis)
  seen = None
  if masks.row_codes is not None:
    seen = by_row(masks.row_codes) == by_key(masks.key_codes)
  if masks.end is not None or seen is None:
    key = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    key = launch.laid_out(key, MATRIX) + first
    end = launch.problem.keys if masks.end is None else by_row(masks.end)
    seen = key < end if seen is None else seen & (key < end)
  return jnp.where(seen, logits, -jnp.inf)


def loop(begin: Any, end: Any, step: Callable, carry: Any) -> Any:
  """Runs carry = step(i, carry) for int32 i."""
  begin, end = (jnp.asarray(x, jnp.int32) for x in (begin, end))
  return lax.fori_loop(begin, end, step, carry)


def spread(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
  """Repeats a number per row (axis 0) or per column (axis 1) over a matrix."""
  return lax.broadcast_in_dim(x, shape, (axis,))


row = functools.partial(spread, axis=0)
column = functools.partial(spread, axis=1)


def alternating(
  first: jax.Array | int, position: jax.Array, end: jax.Array | int
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
