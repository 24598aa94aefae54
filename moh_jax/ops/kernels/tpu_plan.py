"""How the TPU kernels are launched, and what their grid steps load.

The steps of a grid run one after another. Tables that are read beforehand tell
which tiles a step loads, so its tiles are fetched while the step before it
computes. A step without work names the tiles of the step before: then nothing
is fetched.

Shapes as in `tpu`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moh_jax.ops.kernels.problem import Argument, Problem

LANES = 128


@dataclasses.dataclass(frozen=True)
class Plan:
  """Launch of one kernel of one call, and what its grid steps do.

  Attributes:
    problem: the call.
    max_keys: largest L allowed: M, at most LANES, or a multiple of LANES.
    keys_first: whether the grid's outer loop is over tiles of keys and its
      inner one over blocks of rows, instead of the other way round.
  """

  problem: Problem
  max_keys: int
  keys_first: bool

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a tile, L: tiles of nearly equal size, so few keys are padding.

    For instance, 1,100 keys in tiles of at most 1,024 are two tiles of 640.
    """
    if self.problem.keys == self.max_keys:
      return self.max_keys  # a single tile may have any size
    unit = min(LANES, self.max_keys)
    units = pl.cdiv(self.problem.keys, unit)
    return pl.cdiv(units, pl.cdiv(self.problem.keys, self.max_keys)) * unit

  @property
  def key_tiles(self) -> int:
    """Tiles of keys, J."""
    return pl.cdiv(self.problem.keys, self.keys)

  @property
  def grid(self) -> tuple[int, int]:
    """Steps of the outer and the inner loop."""
    grid = self.problem.num_blocks, self.key_tiles
    return grid[::-1] if self.keys_first else grid

  # What is passed to a kernel.

  def tables(self) -> tuple[jax.Array, ...]:
    """Tells the steps about every block of rows, four arrays [T] int32.

    Returns:
      source: the block whose rows are loaded: the block itself, or the last
        used one where it is unused.
      kv_head: its key/value head, b * K + k.
      unmasked: keys that all of its rows see.
      end: keys that at least one of its rows may see.
    """
    blocks = self.problem.blocks
    used = jnp.maximum(blocks.first[-1], 1)
    source = jnp.arange(self.problem.num_blocks, dtype=jnp.int32)
    source = jnp.minimum(source, used - 1)
    kv_head = blocks.head[source] // self.problem.group
    return source, kv_head, *self.problem.key_bounds(self.problem.rows)

  def rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step its block of rows.

    Args:
      x: [T * R, D], loaded as [1, R, D], or [T * R], loaded as [1, 1, R].
    """
    output = isinstance(x, jax.ShapeDtypeStruct)
    inner = (self.problem.rows, *x.shape[1:])
    inner = (1, *inner)[-2:]
    shape = (self.problem.num_blocks, *inner)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if output else x.reshape(shape)

    def index(t, j, source, *_):
      return (t if output else source[t]), 0, 0

    return Argument(x, pl.BlockSpec((1, *inner), self._in_order(index)))

  def keys_or_values(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step a tile of keys or values.

    Args:
      x: [B, M, K, D], loaded as [1, L, D], or as [1, D, L] if the problem is
        `head_dim_first`.
    """
    batch, keys, heads, dim = x.shape
    padded = self.key_tiles * self.keys
    if isinstance(x, jax.ShapeDtypeStruct):
      x = jax.ShapeDtypeStruct((batch * heads, padded, dim), x.dtype)
    else:
      x = x.swapaxes(1, 2).reshape(batch * heads, keys, dim)
      if padded > keys:
        x = jnp.pad(x, ((0, 0), (0, padded - keys), (0, 0)))

    def index(t, j, source, kv_head, unmasked, end):
      place = self._key_tile(t, j, source, end), 0
      transposed = self.problem.head_dim_first
      return kv_head[t], *(place[::-1] if transposed else place)

    block = 1, self.keys, dim
    if self.problem.head_dim_first:
      x, block = x.swapaxes(1, 2), (1, dim, self.keys)
    return Argument(x, pl.BlockSpec(block, self._in_order(index)))

  def key_masks(self) -> tuple:
    """The key mask and each key's segment, [1, 1, L] int32 or None."""
    fill = self.key_tiles * self.keys - self.problem.keys

    def index(t, j, source, kv_head, unmasked, end):
      batch = lax.div(kv_head[t], self.problem.kv_heads)
      return batch, 0, self._key_tile(t, j, source, end)

    spec = pl.BlockSpec((1, 1, self.keys), self._in_order(index))

    def argument(x: jax.Array) -> Argument:
      x = jnp.pad(x.astype(jnp.int32), ((0, 0), (0, fill)))
      return Argument(x[:, None], spec)

    visible = self.problem.visible
    return jax.tree.map(argument, (visible.key_mask, visible.segments))

  def call(
    self,
    kernel: Callable,
    rows: Any,
    keys: tuple,
    outputs: tuple,
    scratch: Sequence[tuple[int, int]],
  ) -> Any:
    """Launches a kernel.

    Args:
      kernel: gets the four tables, rows, keys, values, row masks, key masks,
        the outputs, the scratch arrays, and last one int32 scratch array for
        each mask of the outer loop's side (rows, or keys if `keys_first`),
        which it stores there as a column.
      rows: arrays [T * R, D] or [T * R].
      keys: keys and values.
      outputs: shapes of arrays like the rows, or like the keys if `keys_first`.
      scratch: shapes of float32 arrays that live through all steps.
    """
    row_masks = jax.tree.map(self.rows, self.problem.row_masks())
    key_masks = self.key_masks()
    columns = key_masks if self.keys_first else row_masks
    rows = jax.tree.map(self.rows, rows)
    inputs = rows, *map(self.keys_or_values, keys), row_masks, key_masks
    output = self.keys_or_values if self.keys_first else self.rows
    outputs = tuple(map(output, outputs))
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )

    def column(mask: Argument) -> Any:
      return pltpu.VMEM((mask.spec.block_shape[-1], LANES), jnp.int32)

    arrays = [pltpu.VMEM(shape, jnp.float32) for shape in scratch]
    launch = pl.pallas_call(
      functools.partial(kernel, plan=self),
      out_shape=jax.tree.map(lambda x: x.array, outputs),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=self.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[*arrays, jax.tree.map(column, columns)],
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      interpret=self.problem.interpret,
      name="moh" + kernel.__name__,
    )
    return launch(*self.tables(), *jax.tree.map(lambda x: x.array, inputs))

  # What a step does.

  def step(self) -> tuple[jax.Array, jax.Array]:
    """Indices (t, j) of the step's block of rows and tile of keys."""
    first, second = pl.program_id(0), pl.program_id(1)
    return (second, first) if self.keys_first else (first, second)

  def when_visible(
    self,
    j: jax.Array,
    unmasked: jax.Array,
    end: jax.Array,
    work: Callable[[bool], None],
  ) -> None:
    """Runs work(masked) if the block's rows may see a tile of keys.

    Args:
      j: index of the tile of keys.
      unmasked: keys that all of the rows see.
      end: keys that at least one of them may see.
      work: adds the tile to the step's results.
    """
    start = j * self.keys
    visible = start < end
    if self.problem.masks_by_value:
      pl.when(visible)(functools.partial(work, True))
      return
    needs_no_mask = start + self.keys <= unmasked
    pl.when(visible & needs_no_mask)(functools.partial(work, False))
    # Without a causal mask only a last tile with padding needs one.
    if self.problem.visible.causal or self.problem.keys % self.keys:
      pl.when(visible & ~needs_no_mask)(functools.partial(work, True))

  def seen(
    self, row_masks: tuple, key_masks: tuple, j: jax.Array, *, rows_axis: int
  ) -> jax.Array:
    """Marks which keys of a tile the block's rows see.

    Args:
      row_masks: the rows' last visible keys and segments, [R, 1] if rows_axis
        is 0, else [1, R]; None where the call has no such mask.
      key_masks: the keys' mask and segments, [1, L] or [L, 1].
      j: index of the tile of keys.
      rows_axis: 0 gives [R, L], 1 gives [L, R].
    """
    (last, row_segments), (key_mask, segments) = row_masks, key_masks
    shape = (1, self.keys) if rows_axis == 0 else (self.keys, 1)
    position = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    position = position + j * self.keys
    result = position < self.problem.keys
    if last is not None:
      result = result & (position <= last)
    if key_mask is not None:
      result = result & (key_mask != 0)
    if segments is not None:
      result = result & (segments == row_segments)
    return result

  def _key_tile(
    self, t: jax.Array, j: jax.Array, source: jax.Array, end: jax.Array
  ) -> jax.Array:
    """The tile of keys that step (t, j) loads.

    It is j up to the last tile that the block's rows may see. Later steps, and
    all steps of unused blocks, name that last tile again: nothing is fetched.
    """
    if self.keys_first:
      return j
    j = jnp.where(source[t] < t, self.key_tiles - 1, j)
    return jnp.minimum(
      j, lax.div(jnp.maximum(end[source[t]], 1) - 1, self.keys)
    )

  def _in_order(self, index: Callable) -> Callable:
    """Turns an index map of (t, j, ...) into one in the grid's order."""
    if not self.keys_first:
      return index
    return lambda j, t, *tables: index(t, j, *tables)


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
