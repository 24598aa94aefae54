"""What a program of the GPU kernels loads, computes and stores.

Arrays in Triton have powers of two as sizes. Another head dim is covered by two
column slices, each a power of two: 72 costs 64 + 16 columns instead of 128. Not
in float32, where the compiler would run out of registers. Arrays are read in
place, without padded copies; loads and stores beyond their ends are masked.

Shapes as in `gpu`, and W columns of a slice of the head dim.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.products import across
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.kernels.triton_backend import plgpu
from moh_jax.ops.kernels.triton_tables import Bounds

# An array [X, D] in registers: one array [X, W] per column slice.
Slices = tuple[jax.Array, ...]

SMALLEST = 16  # smallest side of a matrix product in Triton


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


def product(a: Slices, b: Slices) -> jax.Array:
  """Multiplies rows [X, D] with rows [Y, D] to [X, Y] float32."""
  return sum(across(x, y) for x, y in zip(a, b))


@dataclasses.dataclass(frozen=True)
class Program:
  """The tiles of one kernel of one call, and the steps its programs share.

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
  def columns(self) -> tuple[tuple[int, int], ...]:
    """First column and width of the column slices."""
    limit = 1 if self.problem.dtype == jnp.float32 else 2
    return column_slices(self.problem.head_dim, limit)

  @property
  def width(self) -> int:
    """Columns of all slices together, at least D."""
    return sum(self.columns[-1])

  @property
  def ragged(self) -> bool:
    """Whether the last tile of keys has fewer than L."""
    return self.problem.keys % self.keys > 0

  def row_tile(self, program: jax.Array) -> jax.Array:
    """The tile of rows that a program works on."""
    # A causal head's later rows see more keys: the longest loops start first.
    causal = self.problem.visible.causal
    return self.row_tiles - 1 - program if causal else program

  def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits the index b * K + k of a key/value head into b and k."""
    heads = self.problem.kv_heads
    return lax.div(head, heads), lax.rem(head, heads)

  def load(self, ref: Any, rows: Any = slice(None)) -> Slices:
    """Loads rows of [X, D]."""
    return tuple(
      _load(ref.at[rows, pl.ds(first, width)], self._inside(first, width))
      for first, width in self.columns
    )

  def load_at(self, ref: Any, rows: jax.Array) -> Slices:
    """Loads the rows of [X, D] that an array of indices [r] names; 0 for -1."""
    named = (rows >= 0)[:, None]
    return tuple(
      _load(
        ref.at[jnp.maximum(rows, 0)[:, None], first + jnp.arange(width)[None]],
        _both(named, self._inside(first, width)),
      )
      for first, width in self.columns
    )

  def store(self, ref: Any, values: Slices) -> None:
    """Writes a program's tile of rows."""
    for (first, width), x in zip(self.columns, values):
      place = ref.at[:, pl.ds(first, width)]
      mask = self._inside(first, width)
      plgpu.store(place, x.astype(ref.dtype), mask=mask)

  def load_keys(
    self, ref: Any, place: tuple, j: jax.Array, last: bool
  ) -> Slices:
    """Loads tile j of the keys or values; `last` if it may be the last one."""
    batch, head = place
    rows = self._inside_keys(j) if last else None
    return tuple(
      _load(
        ref.at[batch, self._span(j), head, pl.ds(first, width)],
        _both(rows, self._inside(first, width)),
      )
      for first, width in self.columns
    )

  def store_keys(
    self, ref: Any, values: Slices, place: tuple, j: jax.Array
  ) -> None:
    """Writes tile j of the gradient of keys or values."""
    batch, head = place
    for (first, width), x in zip(self.columns, values):
      target = ref.at[batch, self._span(j), head, pl.ds(first, width)]
      mask = _both(self._inside_keys(j), self._inside(first, width))
      plgpu.store(target, x.astype(ref.dtype), mask=mask)

  def zeros(self, rows: int) -> Slices:
    """Initial sums, [rows, D] float32."""
    return tuple(
      jnp.zeros((rows, width), jnp.float32) for _, width in self.columns
    )

  def logits(
    self, rows: Slices, others: Slices, seen: jax.Array | None
  ) -> jax.Array:
    """Products that are base-2 logits once times `exponent_scale`."""
    logits = product(rows, others)
    if self.problem.scale <= 0:
      logits = logits * self.problem.log2_scale
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)

  def weights(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
    """exp2(logits * exponent_scale - shift), where the shift broadcasts."""
    if self.problem.interpret:
      return jnp.exp2(logits * self.exponent_scale - shift)
    # Two instructions. The compiler would make six: it does not fuse the
    # product with the sum, and handles results below 2 ** -126 apart.
    factor = struct.pack(">f", self.exponent_scale).hex()
    program = f"fma.rn.f32 $0, $1, 0f{factor}, $2; ex2.approx.ftz.f32 $0, $0;"
    [result] = plgpu.elementwise_inline_asm(
      program,
      args=[logits, jnp.broadcast_to(-shift, logits.shape)],
      constraints="=f,f,f",
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return result

  @property
  def exponent_scale(self) -> float:
    """Factor of `logits` that `weights` applies.

    It is positive, so that the largest logit is the largest before it too: a
    scale of at most 0 is applied by `logits` itself.
    """
    return self.problem.log2_scale if self.problem.scale > 0 else 1.0

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
      mask = _load(key_mask.at[batch, self._span(j)], inside, False)
      result = _both(result, key(mask))
    if segments is not None:
      theirs = _load(segments.at[batch, self._span(j)], inside, 0)
      result = _both(result, key(theirs) == row(row_segments))
    if last is None and key_mask is None and inside is not None:
      result = _both(result, key(inside))
    return result

  def over_keys(
    self, bounds: tuple | None, index: jax.Array, step: Callable, carry: Any
  ) -> Any:
    """Loops over the tiles of keys that a tile of rows may see.

    Args:
      bounds: references from `row_table`.
      index: the tile of rows.
      step: (j, carry, masked=) -> carry.
      carry: its first value.

    Returns:
      The last carry.
    """
    if bounds is None:
      whole, end = self.problem.keys // self.keys, self.key_tiles
      bounds = Bounds(0, 0, whole, end)
    else:
      bounds = Bounds(*(x[index] for x in bounds))
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
      table: references from `key_table`.
      j: index of the tile of keys.
      head: key/value head of the keys, b * K + k.
      step: (i, carry, masked=) -> carry.
      carry: its first value.

    Returns:
      The last carry.
    """
    first, bounds = table
    group = self.problem.group
    if bounds is None:
      begin, end = (
        first[x * group] * self.tiles_per_block for x in (head, head + 1)
      )
      return loop(begin, end, functools.partial(step, masked=False), carry)

    def over_query_head(g: jax.Array, carry: Any) -> Any:
      own = Bounds(*(x[head * group + g, j] for x in bounds))
      if not self.problem.masks_by_value:  # the last rows see all keys
        own = own._replace(end=own.whole_end)
      return self._in_parts(own, step, carry)

    return loop(0, group, over_query_head, carry)

  def _in_parts(self, bounds: Bounds, step: Callable, carry: Any) -> Any:
    """Loops over tiles with a mask, without, and with a mask."""
    begin, whole_begin, whole_end, end = bounds
    masked = functools.partial(step, masked=True)
    plain = functools.partial(step, masked=False)
    carry = loop(begin, whole_begin, masked, carry)
    carry = loop(whole_begin, whole_end, plain, carry)
    return loop(whole_end, end, masked, carry)

  def _span(self, j: jax.Array) -> pl.Slice:
    return pl.ds(j * self.keys, self.keys)

  def _inside(self, first: int, width: int) -> jax.Array | None:
    """Marks the slice's columns below D, [1, W]; None if all are."""
    if first + width <= self.problem.head_dim:
      return None
    return first + jnp.arange(width)[None] < self.problem.head_dim

  def _inside_keys(self, j: jax.Array) -> jax.Array | None:
    """Marks the keys of tile j below M, [L, 1]; None if all are."""
    if not self.ragged:
      return None
    position = j * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
    return (position < self.problem.keys)[:, None]


def loop(begin: Any, end: Any, step: Callable, carry: Any) -> Any:
  """Runs carry = step(i, carry); unrolled if known to run at most once."""
  if begin is end:
    return carry
  if isinstance(begin, int) and isinstance(end, int) and end - begin < 2:
    return step(jnp.int32(begin), carry) if begin < end else carry
  return lax.fori_loop(begin, end, step, carry)


def _load(ref: Any, mask: jax.Array | None, other: Any = 0.0) -> jax.Array:
  if mask is None:
    return plgpu.load(ref)
  return plgpu.load(ref, mask=mask, other=other)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
  if a is None or b is None:
    return b if a is None else a
  return a & b
