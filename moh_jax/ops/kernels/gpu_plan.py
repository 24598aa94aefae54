"""How the GPU kernels are launched, and what their programs load.

Triton's arrays have powers of two as sizes. A head dim that is none becomes
two of them, so that 72 costs 64 + 16 columns and not 128; not in float32, for
which the compiler then runs out of registers. Arrays are read in place,
without padded copies: what lies beyond them is masked.

Shapes as in `gpu`, and W columns of a part of the head dim.
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
from jax.experimental.pallas import triton as plgpu

from moh_jax.ops.kernels.gpu_tables import keys_of_rows, rows_of_keys
from moh_jax.ops.kernels.problem import Argument, Problem
from moh_jax.ops.kernels.products import across
from moh_jax.ops.kernels.sizes import Tile

Parts = tuple[jax.Array, ...]

SMALLEST = 16  # a side of a matrix product at least


def column_parts(dim: int, most: int) -> tuple[tuple[int, int], ...]:
  """First column and width of one or two powers of two that hold a dim."""
  whole = max(SMALLEST, pl.next_power_of_2(dim))
  half = whole // 2
  rest = max(SMALLEST, pl.next_power_of_2(max(dim - half, 1)))
  if most == 1 or half + rest >= whole:
    return ((0, whole),)
  return ((0, half), (half, rest))


def product(a: Parts, b: Parts) -> jax.Array:
  """Of rows [X, D] with rows [Y, D]: [X, Y] float32."""
  return sum(across(x, y) for x, y in zip(a, b))


@dataclasses.dataclass(frozen=True)
class Plan:
  """One kernel of one call.

  Attributes:
    problem: the call.
    tile: sizes; more rows than a block has, or more keys than there are, are
      cut down.
  """

  problem: Problem
  tile: Tile

  @functools.cached_property
  def rows(self) -> int:
    """Rows of a program, r."""
    return min(self.tile.rows, self.problem.rows)

  @functools.cached_property
  def keys(self) -> int:
    """L."""
    most = max(SMALLEST, pl.next_power_of_2(self.problem.keys))
    return min(self.tile.keys, most)

  @property
  def parts(self) -> int:
    """Programs that share the rows of a block."""
    return self.problem.rows // self.rows

  @property
  def programs(self) -> int:
    """Programs that share all rows, P."""
    return self.problem.num_blocks * self.parts

  @property
  def key_blocks(self) -> int:
    """Programs that share the keys; the last one's may be fewer."""
    return pl.cdiv(self.problem.keys, self.keys)

  @functools.cached_property
  def columns(self) -> tuple[tuple[int, int], ...]:
    """Parts of the head dim."""
    most = 1 if self.problem.dtype == jnp.float32 else 2
    return column_parts(self.problem.head_dim, most)

  @property
  def width(self) -> int:
    """Columns of all parts."""
    return sum(self.columns[-1])

  @property
  def ragged(self) -> bool:
    """Whether the last keys do not fill their block."""
    return self.problem.keys % self.keys > 0

  # What is passed to a kernel.

  def own_rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """The rows of a program, of [T * R, D] or [T * R]."""
    block = (self.rows, self.width)[: x.ndim]
    index = (lambda i: (self._turn(i), 0)) if x.ndim > 1 else self._turn
    return Argument(x, pl.BlockSpec(block, index))

  def all_rows(self, x: jax.Array) -> Argument:
    """All rows, [T * R, D] or [T * R]."""
    return self._whole(x, (x.shape[0], self.width)[: x.ndim])

  def dense(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """All keys or values, [B, M, K, D]."""
    batch, _, heads, _ = x.shape
    return self._whole(x, (batch, self._padded_keys, heads, self.width))

  def row_masks(self, argument: Callable[[jax.Array], Argument]) -> tuple:
    """Of every row the last key it sees and its segment, [T * R] int32."""
    problem = self.problem
    last = problem.last_keys() if problem.visible.causal else None
    return jax.tree.map(argument, (last, problem.row_segments()))

  def key_masks(self) -> tuple:
    """Of every key whether it may be seen and its segment, [B, M]."""
    block = (self.problem.batch, self._padded_keys)
    visible = self.problem.visible
    masks = visible.key_mask, visible.segments
    return jax.tree.map(lambda x: self._whole(x, block), masks)

  def row_table(self) -> tuple:
    """Of every block its head, the number in use, and what programs reach."""
    blocks = self.problem.blocks
    reach = None
    if self.problem.visible.causal:
      reach = keys_of_rows(self.problem, self.rows, self.keys)
    tables = blocks.head, blocks.first[-1:], reach
    return jax.tree.map(lambda x: self._whole(x, x.shape), tables)

  def key_table(self) -> tuple:
    """The first part of every head's rows [B * H + 1], and `rows_of_keys`."""
    first = self.problem.blocks.first * self.parts
    seeing = None
    if self.problem.visible.causal:
      seeing = rows_of_keys(self.problem, self.rows, self.keys)
    return jax.tree.map(lambda x: self._whole(x, x.shape), (first, seeing))

  def call(
    self, kernel: Callable, *, grid: tuple[int, ...], inputs: Any, outputs: Any
  ) -> Any:
    """Launches a kernel on tuples (of tuples) of `Argument`."""
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    launch = pl.pallas_call(
      functools.partial(kernel, plan=self),
      out_shape=jax.tree.map(lambda x: x.array, outputs),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      compiler_params=plgpu.CompilerParams(
        num_warps=self.tile.warps, num_stages=self.tile.stages
      ),
      interpret=self.problem.interpret,
      name="moh" + kernel.__name__,
    )
    return launch(*jax.tree.map(lambda x: x.array, inputs))

  # What a program does.

  def program(self) -> jax.Array:
    """Its part of the rows."""
    return self._turn(pl.program_id(0))

  def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Batch and head of the keys b * K + k."""
    heads = self.problem.kv_heads
    return lax.div(head, heads), lax.rem(head, heads)

  def load(self, ref: Any, rows: Any = slice(None)) -> Parts:
    """Rows of [., D]."""
    return tuple(
      _load(ref.at[rows, pl.ds(first, width)], self._inside(first, width))
      for first, width in self.columns
    )

  def store(self, ref: Any, values: Parts) -> None:
    """Writes the rows of a program."""
    for (first, width), x in zip(self.columns, values):
      place = ref.at[:, pl.ds(first, width)]
      mask = self._inside(first, width)
      plgpu.store(place, x.astype(ref.dtype), mask=mask)

  def load_keys(
    self, ref: Any, place: tuple, j: jax.Array, last: bool
  ) -> Parts:
    """A block of keys or values; `last`: it may be the last one."""
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
    self, ref: Any, values: Parts, place: tuple, j: jax.Array
  ) -> None:
    """Writes a block of the gradient of keys or values."""
    batch, head = place
    for (first, width), x in zip(self.columns, values):
      target = ref.at[batch, self._span(j), head, pl.ds(first, width)]
      mask = _both(self._inside_keys(j), self._inside(first, width))
      plgpu.store(target, x.astype(ref.dtype), mask=mask)

  def zeros(self, rows: int) -> Parts:
    """Sums to add to, [rows, D]."""
    return tuple(
      jnp.zeros((rows, width), jnp.float32) for _, width in self.columns
    )

  def logits(
    self, rows: Parts, others: Parts, seen: jax.Array | None
  ) -> jax.Array:
    """Products of two sides; times `factor`, logits of a softmax in base 2."""
    logits = product(rows, others)
    if self.problem.scale <= 0:
      logits = logits * self.problem.factor
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)

  def weights(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
    """exp2(logits * factor - shift); the shift broadcasts."""
    if self.problem.interpret:
      return jnp.exp2(logits * self.factor - shift)
    # The compiler neither fuses these two nor leaves out what exp2 does for
    # results below 2 ** -126, which makes six instructions of two.
    factor = struct.pack(">f", self.factor).hex()
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
  def factor(self) -> float:
    """Of `logits`; positive, so that maxima may be taken before it."""
    return self.problem.factor if self.problem.scale > 0 else 1.0

  def seen(
    self, row_masks: tuple, key_masks: tuple, batch: jax.Array, j: jax.Array, *,
    rows_axis: int,
  ) -> jax.Array | None:  # fmt: skip
    """Whether rows see the keys of a block; None sees everything.

    Args:
      row_masks: values of `row_masks` for the rows.
      key_masks: references.
      batch: of the keys.
      j: the block of keys.
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
    self, reach: tuple | None, index: jax.Array, step: Callable, carry: Any
  ) -> Any:
    """Runs step(j, carry, masked=) for the blocks of keys that rows may see.

    Args:
      reach: references from `row_table`.
      index: the program's part of the rows.
      step: of the loop.
      carry: of the loop.
    """
    clear, end = self.problem.keys // self.keys, self.key_blocks
    if reach is not None:
      clear, end = (x[index] for x in reach)
    if self.problem.selective:
      clear = 0
    carry = loop(0, clear, functools.partial(step, masked=False), carry)
    return loop(clear, end, functools.partial(step, masked=True), carry)

  def over_rows(
    self,
    table: tuple,
    j: jax.Array,
    head: jax.Array,
    step: Callable,
    carry: Any,
  ) -> Any:
    """Runs step(i, carry, masked=) for the parts of rows that may see keys.

    Args:
      table: references from `key_table`.
      j: the block of keys.
      head: b * K + k of the keys.
      step: of the loop.
      carry: of the loop.
    """
    first, seeing = table
    group, selective = self.problem.group, self.problem.selective
    plain = functools.partial(step, masked=False)
    masked = functools.partial(step, masked=True)
    if seeing is None:
      bounds = first[head * group], first[(head + 1) * group]
      return loop(*bounds, masked if selective else plain, carry)

    def of_query_head(g: jax.Array, carry: Any) -> Any:
      row = head * group + g
      begin, clear = (x[row, j] for x in seeing)
      end = first[row + 1]
      if selective:
        return loop(begin, end, masked, carry)
      return loop(clear, end, plain, loop(begin, clear, masked, carry))

    return loop(0, group, of_query_head, carry)

  def _turn(self, i: jax.Array) -> jax.Array:
    # Later rows of a head see more keys if causal: the longest go first.
    return self.programs - 1 - i if self.problem.visible.causal else i

  @property
  def _padded_keys(self) -> int:
    return self.key_blocks * self.keys

  def _whole(self, x: Any, block: tuple[int, ...]) -> Argument:
    return Argument(x, pl.BlockSpec(block, lambda *_: (0,) * len(block)))

  def _span(self, j: jax.Array) -> pl.Slice:
    return pl.ds(j * self.keys, self.keys)

  def _inside(self, first: int, width: int) -> jax.Array | None:
    """[1, W], None if all columns are."""
    if first + width <= self.problem.head_dim:
      return None
    return first + jnp.arange(width)[None] < self.problem.head_dim

  def _inside_keys(self, j: jax.Array) -> jax.Array | None:
    """[L, 1], None if all keys are."""
    if not self.ragged:
      return None
    position = j * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
    return (position < self.problem.keys)[:, None]


def loop(begin: Any, end: Any, step: Callable, carry: Any) -> Any:
  """Runs step(i, carry); a loop of fixed length below 2 is none."""
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
