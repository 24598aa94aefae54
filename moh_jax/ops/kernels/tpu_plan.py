"""How the TPU kernels are launched, and what their steps see.

The steps of a grid run in order. Which blocks of arrays a step sees comes from
tables that are read before it starts, so the next ones are fetched meanwhile;
a step that has nothing to do names the block of the step before, and nothing
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
  """One kernel of one call.

  Attributes:
    problem: the call.
    most_keys: L at most, a multiple of LANES if it is more and is not M.
    keys_first: whether the outer steps of the grid are the keys' blocks.
  """

  problem: Problem
  most_keys: int
  keys_first: bool

  @functools.cached_property
  def keys(self) -> int:
    """L: as even a share of M as there is."""
    if self.problem.keys == self.most_keys:
      return self.most_keys  # all at once may be any number
    unit = min(LANES, self.most_keys)
    units = pl.cdiv(self.problem.keys, unit)
    return pl.cdiv(units, pl.cdiv(self.problem.keys, self.most_keys)) * unit

  @property
  def key_blocks(self) -> int:
    """J."""
    return pl.cdiv(self.problem.keys, self.keys)

  @property
  def transposed(self) -> bool:
    """Whether keys and values are [D, L] instead of [L, D].

    XLA stores a cache so where the head dim does not fill the lanes, and would
    have to copy all of it.
    """
    return self.problem.cached and self.problem.head_dim % LANES > 0

  @property
  def grid(self) -> tuple[int, int]:
    """Of blocks of rows and keys."""
    grid = self.problem.num_blocks, self.key_blocks
    return grid[::-1] if self.keys_first else grid

  # What is passed to a kernel.

  def tables(self) -> tuple[jax.Array, ...]:
    """What steps are told of every block of rows, four of [T] int32.

    Returns:
      Itself, or the last one in use; the head b * K + k of its keys; how many
      keys all of its rows see; how many any of them may see.
    """
    blocks = self.problem.blocks
    used = jnp.maximum(blocks.first[-1], 1)
    own = jnp.arange(self.problem.num_blocks, dtype=jnp.int32)
    own = jnp.minimum(own, used - 1)
    kv_head = blocks.head[own] // self.problem.group
    return own, kv_head, *self.problem.reach(self.problem.rows)

  def rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """The rows of a block, of [T * R, D] or [T * R]; [1, R, D] or [1, 1, R]."""
    output = isinstance(x, jax.ShapeDtypeStruct)
    inner = (self.problem.rows, *x.shape[1:])
    inner = (1, *inner)[-2:]
    shape = (self.problem.num_blocks, *inner)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if output else x.reshape(shape)

    def index(t, j, own, *_):
      return (t if output else own[t]), 0, 0

    return Argument(x, pl.BlockSpec((1, *inner), self._in_order(index)))

  def dense(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """A block of keys, [1, L, D] or `transposed`, of [B, M, K, D]."""
    batch, keys, heads, dim = x.shape
    padded = self.key_blocks * self.keys
    if isinstance(x, jax.ShapeDtypeStruct):
      x = jax.ShapeDtypeStruct((batch * heads, padded, dim), x.dtype)
    else:
      x = x.swapaxes(1, 2).reshape(batch * heads, keys, dim)
      if padded > keys:
        x = jnp.pad(x, ((0, 0), (0, padded - keys), (0, 0)))

    def index(t, j, own, kv_head, least, most):
      place = self._key_block(t, j, own, most), 0
      return kv_head[t], *(place[::-1] if self.transposed else place)

    block = 1, self.keys, dim
    if self.transposed:
      x, block = x.swapaxes(1, 2), (1, dim, self.keys)
    return Argument(x, pl.BlockSpec(block, self._in_order(index)))

  def row_masks(self) -> tuple:
    """Of every row the last key that it sees and its segment, [1, 1, R]."""
    problem = self.problem
    last = problem.last_keys() if problem.visible.causal else None
    return jax.tree.map(self.rows, (last, problem.row_segments()))

  def key_masks(self) -> tuple:
    """Of every key whether it may be seen and its segment, [1, 1, L] int32."""
    fill = self.key_blocks * self.keys - self.problem.keys

    def index(t, j, own, kv_head, least, most):
      batch = lax.div(kv_head[t], self.problem.kv_heads)
      return batch, 0, self._key_block(t, j, own, most)

    spec = pl.BlockSpec((1, 1, self.keys), self._in_order(index))

    def argument(x: jax.Array) -> Argument:
      x = jnp.pad(x.astype(jnp.int32), ((0, 0), (0, fill)))
      return Argument(x[:, None], spec)

    visible = self.problem.visible
    return jax.tree.map(argument, (visible.key_mask, visible.segments))

  def call(
    self,
    kernel: Callable,
    *,
    inputs: Any,
    outputs: Any,
    scratch: Sequence[tuple[int, int]],
    columns: tuple,
  ) -> Any:
    """Launches a kernel.

    Args:
      kernel: gets the four tables, the inputs, the outputs, then scratch.
      inputs: tuples (of tuples) of `Argument`.
      outputs: a tuple of `Argument`.
      scratch: shapes of sums, float32.
      columns: masks, `row_masks` or `key_masks`, that the kernel turns into
        columns; it gets one int32 scratch for each.
    """
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    scratch = [pltpu.VMEM(shape, jnp.float32) for shape in scratch]
    for mask in jax.tree.leaves(columns):
      shape = mask.spec.block_shape[-1], LANES
      scratch.append(pltpu.VMEM(shape, jnp.int32))
    launch = pl.pallas_call(
      functools.partial(kernel, plan=self),
      out_shape=jax.tree.map(lambda x: x.array, outputs),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=self.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
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
    """Its block of rows and its block of keys."""
    first, second = pl.program_id(0), pl.program_id(1)
    return (second, first) if self.keys_first else (first, second)

  def at_work(
    self,
    j: jax.Array,
    least: jax.Array,
    most: jax.Array,
    work: Callable[[bool], None],
  ) -> None:
    """Runs work(masked) if rows may see a block of keys.

    Args:
      j: the block of keys.
      least: keys that all of the rows see.
      most: keys that any of them may see.
      work: of the step.
    """
    start = j * self.keys
    some = start < most
    if self.problem.selective:
      pl.when(some)(functools.partial(work, True))
      return
    # Without hidden keys only the last block may need a mask, for its end.
    clear = start + self.keys <= least
    pl.when(some & clear)(functools.partial(work, False))
    if self.problem.visible.causal or self.problem.keys % self.keys:
      pl.when(some & ~clear)(functools.partial(work, True))

  def seen(
    self, row_masks: tuple, key_masks: tuple, j: jax.Array, *, rows_axis: int
  ) -> jax.Array:
    """Whether rows see the keys of a block.

    Args:
      row_masks: the last key that rows see and their segments, [R, 1] if
        rows_axis is 0, else [1, R]; None where nothing is masked so.
      key_masks: whether keys may be seen and their segments, [1, L] or [L, 1].
      j: the block of keys.
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

  def _key_block(
    self, t: jax.Array, j: jax.Array, own: jax.Array, most: jax.Array
  ) -> jax.Array:
    """The block of keys that a step sees.

    That is the last one that its rows may see instead of those after it, and
    instead of all where blocks of rows are not in use.
    """
    if self.keys_first:
      return j
    j = jnp.where(own[t] < t, self.key_blocks - 1, j)
    return jnp.minimum(j, lax.div(jnp.maximum(most[own[t]], 1) - 1, self.keys))

  def _in_order(self, index: Callable) -> Callable:
    """From a map of (t, j, ...) one of the grid's order."""
    if not self.keys_first:
      return index
    return lambda j, t, *tables: index(t, j, *tables)


def as_columns(row: jax.Array) -> jax.Array:
  """[1, X] to [X, LANES], the same in every lane."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widen(columns: jax.Array, width: int) -> jax.Array:
  """[X, LANES], the same in every lane, to [X, width] without any shuffle."""
  copies = pl.cdiv(width, LANES)
  if copies > 1:
    columns = jnp.concatenate([columns] * copies, axis=1)
  return columns[:, :width]
