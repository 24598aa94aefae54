"""The kernels for GPUs (Pallas Triton).

The matrix of logits is cut into tiles of r rows and L keys. A program of the
first two kernels (forward, gradient of the queries) holds one tile's rows and
loops over the tiles of keys. A program of the third (gradients of keys and
values) holds the keys of one tile of one key/value head and loops over the
tiles of rows that read it, of all query heads, as many as the table has. Every
loop is split in two: tiles whose rows all see all keys skip the masks. The
softmax is in base 2, which the hardware computes directly.

Arrays in Triton have powers of two as sizes. Another head dim is covered by two
column slices, each a power of two: 72 costs 64 + 16 columns instead of 128. Not
in float32, where the compiler would run out of registers. Arrays are read in
place, without padded copies; loads and stores beyond their ends are masked.

JAX is going to remove Pallas' back end Triton. Without it these kernels do not
run, and everything else does.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, r rows of a tile, L keys of a tile, P tiles of
rows in all blocks, J tiles of keys, W columns of a slice of the head dim.
"""

import concurrent.futures
import dataclasses
import functools
import struct
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import (
  LOG2_E,
  Argument,
  Arrays,
  BlockSizes,
  Kernels,
  Problem,
  Ranges,
  Tile,
  across,
  keys_of_rows,
  rows_of_keys,
  times,
)
from moh_jax.ops.target import Target, vary_alike

try:
  from jax.experimental.pallas import triton as plgpu
except ImportError:
  plgpu = None

MISSING = "" if plgpu else f"Pallas' Triton, which jax {jax.__version__} lacks"

# An array [X, D] in registers: one array [X, W] per column slice.
Slices = tuple[jax.Array, ...]

_OWN = (slice(None),)  # index of all rows of a program's tile
SMALLEST = 16  # smallest side of a matrix product in Triton


class Triton(Kernels):
  """The kernels for GPUs of compute capability 8.0 and later."""

  tiles: ClassVar = {
    2: {
      32: BlockSizes.of((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
      64: BlockSizes.of((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
      128: BlockSizes.of((128, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
      256: BlockSizes.of((64, 32, 4, 2), (64, 16, 4, 2), (32, 32, 8, 2)),
    },
    4: {
      64: BlockSizes.of((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
      128: BlockSizes.of((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 2)),
      256: BlockSizes.of((32, 16, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2)),
    },
  }
  picks_rows = True

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """See `Kernels.unable`."""
    if device.platform == "cpu":
      return MISSING
    return device.gpu_problem or refused()

  def rows_must_be(self, rows: int) -> str:
    """See `Kernels.rows_must_be`."""
    fits = rows >= SMALLEST and not rows & (rows - 1)
    return "" if fits else f"a power of two of at least {SMALLEST}"

  def lacks(self, dtype: str, head_dim: int) -> str:
    """See `Kernels.lacks`."""
    return MISSING

  def run(
    self, name: str, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.run`."""
    program = Program(problem, tile)
    if name == "dkv":
      return program.call_by_keys(_key_gradients_kernel, rows, keys)
    if name == "dq":
      return program.call_by_rows(_query_gradient_kernel, rows, keys)
    queries = program.all_rows(rows[0].reshape(-1, problem.head_dim))
    rows = problem.blocks.pair, queries
    return program.call_by_rows(_forward_kernel, rows, keys)


def column_slices(dim: int, limit: int) -> tuple[tuple[int, int], ...]:
  """Covers a head dim with slices whose widths are powers of two.

  Args:
    dim: D.
    limit: slices allowed, 1 or 2.

  Returns:
    First column and width of each slice, for instance ((0, 64), (64, 16)) for
    72. Two slices only where they are narrower than one.
  """
  whole = max(SMALLEST, pl.next_power_of_2(dim))
  half = whole // 2
  rest = max(SMALLEST, pl.next_power_of_2(max(dim - half, 1)))
  if limit == 1 or half + rest >= whole:
    return ((0, whole),)
  return ((0, half), (half, rest))


@dataclasses.dataclass(frozen=True)
class Columns:
  """How arrays [..., D] are loaded and stored: in slices of their columns.

  Attributes:
    dim: D.
    slices: first column and width of each.
  """

  dim: int
  slices: tuple[tuple[int, int], ...]

  @classmethod
  def of(cls, dim: int, dtype: jnp.dtype) -> "Columns":
    """The columns of heads whose products are in a dtype."""
    return cls(dim, column_slices(dim, 1 if dtype == jnp.float32 else 2))

  @property
  def width(self) -> int:
    """Columns of all slices together, at least D."""
    return sum(self.slices[-1])

  def load(
    self, ref: Any, place: tuple, rows: jax.Array | None = None
  ) -> Slices:
    """Loads rows [X, D].

    Args:
      ref: [..., D].
      place: index of all dimensions but the last.
      rows: [X, 1] bool, which to load; the others are 0. None loads all.
    """
    return tuple(
      load(ref.at[(*place, pl.ds(first, width))], self._inside(rows, first))
      for first, width in self.slices
    )

  def load_at(self, ref: Any, rows: jax.Array) -> Slices:
    """Loads the rows of [X, D] that an array of indices [r] names; 0 for -1."""
    named = (rows >= 0)[:, None]
    rows = jnp.maximum(rows, 0)[:, None]
    return tuple(
      load(
        ref.at[rows, first + jnp.arange(width)[None]],
        self._inside(named, first),
      )
      for first, width in self.slices
    )

  def store(
    self, ref: Any, place: tuple, values: Slices, rows: jax.Array | None = None
  ) -> None:
    """Writes rows [X, D]; arguments as those of `load`."""
    for (first, width), x in zip(self.slices, values):
      target = ref.at[(*place, pl.ds(first, width))]
      mask = self._inside(rows, first)
      plgpu.store(target, x.astype(ref.dtype), mask=mask)

  def zeros(self, rows: int) -> Slices:
    """Initial sums, [rows, D] float32."""
    return tuple(
      jnp.zeros((rows, width), jnp.float32) for _, width in self.slices
    )

  def _inside(self, rows: jax.Array | None, first: int) -> jax.Array | None:
    """Marks what a slice loads of [X, D]; None if all of it."""
    width = dict(self.slices)[first]
    if first + width <= self.dim:
      return rows
    return _both(rows, first + jnp.arange(width)[None] < self.dim)


def product(a: Slices, b: Slices) -> jax.Array:
  """Multiplies rows [X, D] with rows [Y, D] to [X, Y] float32."""
  return sum(across(x, y) for x, y in zip(a, b))


@dataclasses.dataclass(frozen=True)
class Program:
  """One kernel of one call: its launch, and what its programs share.

  Attributes:
    problem: the call.
    tile: sizes; reduced to the rows of a block and to the number of keys.
  """

  problem: Problem
  tile: Tile

  @functools.cached_property
  def rows(self) -> int:
    """Rows of a tile, r."""
    return min(self.tile.rows, self.problem.rows)

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a tile, L."""
    whole = max(SMALLEST, pl.next_power_of_2(self.problem.keys))
    return min(self.tile.keys, whole)

  @property
  def tiles_per_block(self) -> int:
    """Tiles of rows in a block, R / r."""
    return self.problem.rows // self.rows

  @property
  def row_tiles(self) -> int:
    """Tiles of rows in all blocks, P."""
    return self.problem.num_blocks * self.tiles_per_block

  @property
  def key_tiles(self) -> int:
    """Tiles of keys, J; the last may have fewer than L keys."""
    return pl.cdiv(self.problem.keys, self.keys)

  @functools.cached_property
  def columns(self) -> Columns:
    """How arrays of rows and keys are loaded."""
    return Columns.of(self.problem.head_dim, self.problem.dtype)

  @property
  def ragged(self) -> bool:
    """Whether the last tile of keys has fewer than L."""
    return self.problem.keys % self.keys > 0

  def row_tile(self, program: jax.Array) -> jax.Array:
    """The tile of rows that a program works on."""
    # A causal head's later rows see more keys: the longest loops start first.
    causal = self.problem.visible.causal
    return self.row_tiles - 1 - program if causal else program

  def each_tile_of_rows(self, table: tuple, masks: tuple) -> Callable:
    """Decorates what a program does with its tile of rows, if that is used.

    Args:
      table: references to the table of `call_by_rows`.
      masks: references to the masks of rows and keys.

    Returns:
      Decorator of a function that gets the index of the tile, the place of the
      key/value head that it reads, and the function j -> `seen`.
    """
    heads, first, _ = table
    index = self.row_tile(pl.program_id(0))
    t = lax.div(index, self.tiles_per_block)

    def decorate(work: Callable) -> None:
      @pl.when(t < first[first.shape[0] - 1])
      def _() -> None:
        place = self.place(heads[t])
        own = jax.tree.map(lambda x: x[...], masks[0])
        seen = functools.partial(self.seen, own, masks[1], place[0])
        work(index, place, functools.partial(seen, rows_axis=0))

    return decorate

  def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits the index b * K + k of a key/value head into b and k."""
    heads = self.problem.kv_heads
    return lax.div(head, heads), lax.rem(head, heads)

  def load_keys(
    self, ref: Any, place: tuple, j: jax.Array, last: bool
  ) -> Slices:
    """Loads tile j of the keys or values; `last` if it may be the last one."""
    place = place[0], self._span(j), place[1]
    return self.columns.load(ref, place, self._inside_keys(j) if last else None)

  def store_keys(
    self, ref: Any, values: Slices, place: tuple, j: jax.Array
  ) -> None:
    """Writes tile j of the gradient of keys or values."""
    place = place[0], self._span(j), place[1]
    self.columns.store(ref, place, values, self._inside_keys(j))

  def logits(
    self, rows: Slices, others: Slices, seen: jax.Array | None
  ) -> jax.Array:
    """`Problem.scaled` products of rows, -inf where they do not see a key."""
    logits = self.problem.scaled(product(rows, others))
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)

  def weights(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
    """exp2(logits * exponent_scale - shift), where the shift broadcasts."""
    if self.problem.interpret:
      return jnp.exp2(logits * self.problem.exponent_scale - shift)
    # Two instructions. The compiler would make six: it does not fuse the
    # product with the sum, and handles results below 2 ** -126 apart.
    factor = struct.pack(">f", self.problem.exponent_scale).hex()
    program = f"fma.rn.f32 $0, $1, 0f{factor}, $2; ex2.approx.ftz.f32 $0, $0;"
    [result] = plgpu.elementwise_inline_asm(
      program,
      args=[logits, jnp.broadcast_to(-shift, logits.shape)],
      constraints="=f,f,f",
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return result

  def seen(
    self, row_masks: tuple, key_masks: tuple, batch: jax.Array, j: jax.Array, *,
    rows_axis: int,
  ) -> jax.Array | None:  # fmt: skip
    """Marks which keys of a tile its rows see; None if all see all.

    Args:
      row_masks: values of `row_masks` for the rows.
      key_masks: references to `key_masks`.
      batch: index of the keys' batch.
      j: index of the tile of keys.
      rows_axis: 0 gives [r, L], 1 gives [L, r].
    """
    row = lambda x: jnp.expand_dims(x, 1 - rows_axis)  # noqa: E731
    key = lambda x: jnp.expand_dims(x, rows_axis)  # noqa: E731
    (last, row_segments), (key_mask, segments) = row_masks, key_masks
    position = j * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
    inside = position < self.problem.keys if self.ragged else None
    result = None
    if last is not None:
      result = _both(result, key(position) <= row(last))
    if key_mask is not None:
      mask = load(key_mask.at[batch, self._span(j)], inside, False)
      result = _both(result, key(mask))
    if segments is not None:
      theirs = load(segments.at[batch, self._span(j)], inside, 0)
      result = _both(result, key(theirs) == row(row_segments))
    if last is None and key_mask is None and inside is not None:
      result = _both(result, key(inside))
    return result

  def over_keys(
    self, bounds: tuple | None, index: jax.Array, step: Callable, carry: Any
  ) -> Any:
    """Loops over the tiles of keys that a tile of rows may see.

    Args:
      bounds: references to the table of `call_by_rows`.
      index: the tile of rows.
      step: (j, carry, masked=) -> carry.
      carry: its first value.

    Returns:
      The last carry.
    """
    if bounds is None:
      whole, end = self.problem.keys // self.keys, self.key_tiles
      bounds = Ranges(0, 0, whole, end)
    else:
      bounds = Ranges(*(x[index] for x in bounds))
    if not self.problem.masks_by_value:  # every row sees the first keys
      bounds = bounds._replace(begin=0, whole_begin=0)
    return self._in_parts(bounds, step, carry)

  def over_rows(
    self,
    table: tuple,
    j: jax.Array,
    head: jax.Array,
    step: Callable,
    carry: Any,
  ) -> Any:
    """Loops over the tiles of rows that may see a tile of keys.

    Args:
      table: references to the table of `call_by_keys`.
      j: index of the tile of keys.
      head: key/value head of the keys, b * K + k.
      step: (i, carry, masked=) -> carry.
      carry: its first value.

    Returns:
      The last carry.
    """
    first, bounds = table
    if bounds is None:
      begin, end = (first[x] * self.tiles_per_block for x in (head, head + 1))
      return loop(begin, end, functools.partial(step, masked=False), carry)
    own = Ranges(*(x[head, j] for x in bounds))
    if not self.problem.masks_by_value:  # the last rows see all keys
      own = own._replace(end=own.whole_end)
    return self._in_parts(own, step, carry)

  def _in_parts(self, bounds: Ranges, step: Callable, carry: Any) -> Any:
    """Loops over tiles with a mask, without, and with a mask."""
    begin, whole_begin, whole_end, end = bounds
    masked = functools.partial(step, masked=True)
    plain = functools.partial(step, masked=False)
    carry = loop(begin, whole_begin, masked, carry)
    carry = loop(whole_begin, whole_end, plain, carry)
    return loop(whole_end, end, masked, carry)

  def _span(self, j: jax.Array) -> pl.Slice:
    return pl.ds(j * self.keys, self.keys)

  def _inside_keys(self, j: jax.Array) -> jax.Array | None:
    """Marks the keys of tile j below M, [L, 1]; None if all are."""
    if not self.ragged:
      return None
    position = j * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
    return (position < self.problem.keys)[:, None]

  # The launch.

  def own_rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes each program its tile of rows, of [T * R, D] or [T * R]."""
    block = (self.rows, self.columns.width)[: x.ndim]
    index = (lambda i: (self.row_tile(i), 0)) if x.ndim > 1 else self.row_tile
    return Argument(x, pl.BlockSpec(block, index))

  def all_rows(self, x: jax.Array) -> Argument:
    """Passes each program all rows, [X, D] or [X]."""
    return self._whole(x, (x.shape[0], self.columns.width)[: x.ndim])

  def keys_or_values(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes each program all keys or values, [B, M, K, D]."""
    batch, _, heads, _ = x.shape
    return self._whole(x, (batch, self._padded_keys, heads, self.columns.width))

  def key_masks(self) -> tuple:
    """The key mask and each key's segment, [B, M] or None."""
    block = (self.problem.batch, self._padded_keys)
    visible = self.problem.visible
    masks = visible.key_mask, visible.segments
    return jax.tree.map(lambda x: self._whole(x, block), masks)

  def call_by_rows(self, kernel: Callable, rows: Any, keys: tuple) -> tuple:
    """Launches a kernel with one program per tile of rows.

    Args:
      kernel: gets the table, then the inputs, the masks and the outputs. The
        table has each block's key/value head, their first blocks, and the
        loops' bounds of `keys_of_rows`, None if nothing is hidden.
      rows: arrays [T * R, D] or [T * R], of which a program gets its tile, or
        arguments.
      keys: keys and values.
    """
    blocks, bounds = self.problem.blocks, self._bounds(keys_of_rows)
    table = blocks.head, blocks.first, bounds
    inputs = self._inputs(table, rows, keys, self.own_rows)
    outputs = tuple(map(self.own_rows, self.problem.row_outputs))
    return self._call(kernel, (self.row_tiles,), inputs, outputs)

  def call_by_keys(self, kernel: Callable, rows: Any, keys: tuple) -> tuple:
    """Launches a kernel with one program per tile of keys of each head.

    Args:
      kernel: gets the table, then the inputs, the masks and the outputs. The
        table has the first block of each head [B * K + 1] and the loops' bounds
        of `rows_of_keys`, None if nothing is hidden.
      rows: arrays [T * R, D] or [T * R].
      keys: keys and values.
    """
    table = self.problem.blocks.first, self._bounds(rows_of_keys)
    inputs = self._inputs(table, rows, keys, self.all_rows)
    outputs = tuple(map(self.keys_or_values, self.problem.key_outputs))
    grid = self.key_tiles, self.problem.batch * self.problem.kv_heads
    return self._call(kernel, grid, inputs, outputs)

  def _bounds(self, bounds_of: Callable) -> Ranges | None:
    if self.problem.visible.everything:
      return None
    return bounds_of(self.problem, self.rows, self.keys)

  def _inputs(
    self, table: tuple, rows: Any, keys: tuple, argument: Callable
  ) -> tuple:
    """Arguments of a kernel; `argument` makes those with one entry per row."""
    return (
      jax.tree.map(lambda x: self._whole(x, x.shape), table),
      tuple(x if isinstance(x, Argument) else argument(x) for x in rows),
      jax.tree.map(self.keys_or_values, keys),
      (jax.tree.map(argument, self.problem.row_masks()), self.key_masks()),
    )

  def _call(
    self, kernel: Callable, grid: tuple[int, ...], inputs: Any, outputs: Any
  ) -> Any:
    """Launches a kernel on tuples (of tuples) of `Argument`."""
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    arrays = jax.tree.map(lambda x: x.array, (outputs, inputs))
    call = launch(
      functools.partial(kernel, plan=self),
      self.tile,
      out_shape=vary_alike(*arrays),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      interpret=self.problem.interpret,
      name="moh" + kernel.__name__,
    )
    return call(*arrays[1])

  @property
  def _padded_keys(self) -> int:
    return self.key_tiles * self.keys

  def _whole(self, x: Any, block: tuple[int, ...]) -> Argument:
    return Argument(x, pl.BlockSpec(block, lambda *_: (0,) * len(block)))


def loop(begin: Any, end: Any, step: Callable, carry: Any) -> Any:
  """Runs carry = step(i, carry); unrolled if known to run at most once."""
  if begin is end:
    return carry
  if isinstance(begin, int) and isinstance(end, int) and end - begin < 2:
    return step(jnp.int32(begin), carry) if begin < end else carry
  return lax.fori_loop(begin, end, step, carry)


def load(ref: Any, mask: jax.Array | None, other: Any = 0.0) -> jax.Array:
  """Loads what a mask marks, else `other`; None loads all."""
  if mask is None:
    return plgpu.load(ref)
  return plgpu.load(ref, mask=mask, other=other)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
  if a is None or b is None:
    return b if a is None else a
  return a & b


def _forward_kernel(
  table: tuple, queries: tuple, keys: tuple, masks: tuple, out_ref: Any,
  sum_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  pair_ref, q_ref = queries
  k_ref, v_ref = keys

  @plan.each_tile_of_rows(table, masks)
  def _(index: jax.Array, place: tuple, seen_in: Callable) -> None:
    # Empty rows are 0, as in the gradients: these use the sums of this pass.
    q = plan.columns.load_at(q_ref, pair_ref[...])

    def step(j: jax.Array, carry: tuple, *, masked: bool) -> tuple:
      acc, highest, total = carry
      seen = seen_in(j) if masked else None
      k = plan.load_keys(k_ref, place, j, last=masked)
      logits = plan.logits(q, k, seen)
      new = jnp.maximum(highest, logits.max(1))
      shift = new
      if masked:
        # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
        shift = jnp.where(new == -jnp.inf, 0.0, new)
      decay = jnp.exp2((highest - shift) * plan.problem.exponent_scale)
      weights = plan.weights(
        logits, (shift * plan.problem.exponent_scale)[:, None]
      )
      total = total * decay + weights.sum(1)
      v = plan.load_keys(v_ref, place, j, last=masked)
      weights = weights.astype(v[0].dtype)
      acc = tuple(x * decay[:, None] for x in acc)
      return _add(acc, weights, v), new, total

    lowest = jnp.full(plan.rows, -jnp.inf, jnp.float32)
    start = plan.columns.zeros(plan.rows), lowest, jnp.zeros_like(lowest)
    acc, highest, total = plan.over_keys(table[2], index, step, start)
    sees_keys = total > 0
    total = jnp.where(sees_keys, total, 1.0)
    norm = (1 / total)[:, None]
    plan.columns.store(out_ref, _OWN, tuple(x * norm for x in acc))
    shift = jnp.where(sees_keys, highest, 0.0) * plan.problem.exponent_scale
    sum_ref[...] = shift + jnp.log(total) * LOG2_E


def _query_gradient_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dq_ref: Any,
  inner_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  q_ref, out_ref, sum_ref, grad_ref = rows
  k_ref, v_ref = keys

  @plan.each_tile_of_rows(table, masks)
  def _(index: jax.Array, place: tuple, seen_in: Callable) -> None:
    q, grad = (plan.columns.load(x, _OWN) for x in (q_ref, grad_ref))
    log_sum = sum_ref[...][:, None]
    inner = sum(
      (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)
      for x, y in zip(plan.columns.load(out_ref, _OWN), grad)
    )
    inner_ref[...] = inner

    def step(j: jax.Array, dq: Slices, *, masked: bool) -> Slices:
      seen = seen_in(j) if masked else None
      k = plan.load_keys(k_ref, place, j, last=masked)
      v = plan.load_keys(v_ref, place, j, last=masked)
      weights = plan.weights(plan.logits(q, k, seen), log_sum)
      dlogits = weights * (product(grad, v) - inner[:, None])
      return _add(dq, dlogits.astype(k_ref.dtype), k)

    dq = plan.over_keys(table[2], index, step, plan.columns.zeros(plan.rows))
    dq = tuple(x * plan.problem.scale for x in dq)
    plan.columns.store(dq_ref, _OWN, dq)


def _key_gradients_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dk_ref: Any,
  dv_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  q_ref, sum_ref, inner_ref, grad_ref = rows
  k_ref, v_ref = keys
  j, head = pl.program_id(0), pl.program_id(1)
  place = plan.place(head)
  k = plan.load_keys(k_ref, place, j, last=True)
  v = plan.load_keys(v_ref, place, j, last=True)

  # Logits are transposed, [L, r]: the weights are then left operands of both
  # products, which need no transposition in registers.
  def step(i: jax.Array, carry: tuple, *, masked: bool) -> tuple:
    dk, dv = carry
    span = pl.ds(i * plan.rows, plan.rows)
    seen = None
    if masked:
      row_masks = jax.tree.map(lambda x: x[span], masks[0])
      seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=1)
    q, grad = (plan.columns.load(x, (span,)) for x in (q_ref, grad_ref))
    log_sum, inner = sum_ref[span][None], inner_ref[span][None]
    weights = plan.weights(plan.logits(k, q, seen), log_sum)
    dv = _add(dv, weights.astype(grad_ref.dtype), grad)
    dlogits = weights * (product(v, grad) - inner)
    return _add(dk, dlogits.astype(q_ref.dtype), q), dv

  zeros = plan.columns.zeros(plan.keys)
  dk, dv = plan.over_rows(table, j, head, step, (zeros, zeros))
  dk = tuple(x * plan.problem.scale for x in dk)
  plan.store_keys(dk_ref, dk, place, j)
  plan.store_keys(dv_ref, dv, place, j)


def _add(total: Slices, weights: jax.Array, rows: Slices) -> Slices:
  """Adds weights [X, Y] times rows [Y, D] to [X, D]."""
  return tuple(x + times(weights, y) for x, y in zip(total, rows))


def launch(kernel: Callable, tile: Tile, **options: Any) -> Callable:
  """Returns the `pl.pallas_call` of a kernel with a tile's warps and stages."""
  # JAX warns whenever it lowers a Triton kernel, after this has returned: a
  # line on a user's terminal, an error where warnings are errors.
  warnings.filterwarnings(
    "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
  )
  params = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
  return pl.pallas_call(kernel, compiler_params=params, **options)


@functools.cache
def refused() -> str:
  """What compiling Triton kernels needs and this JAX has not; else empty.

  The smallest kernel is lowered once for a GPU, which need not be here.
  """
  if MISSING:
    return MISSING

  def lower() -> None:
    x = jax.ShapeDtypeStruct((16,), "float32")
    copy = lambda x, out: plgpu.store(out, plgpu.load(x))  # noqa: E731
    call = jax.jit(launch(copy, Tile(16, 16), out_shape=x))
    gpu = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
      call.trace(x).lower(lowering_platforms=("cuda",))

  # A thread of its own has neither the mesh nor the trace of the caller.
  error = concurrent.futures.ThreadPoolExecutor(1).submit(lower).exception()
  if error is None:
    return ""
  reason = f"{type(error).__name__}: {error}".splitlines()[0]
  return f"Pallas' Triton, which jax {jax.__version__} refuses ({reason})"
