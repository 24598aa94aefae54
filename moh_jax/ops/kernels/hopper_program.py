"""What the warpgroups of the Hopper kernels share: tiles, memory, products.

A program is a few warpgroups of 128 threads: consumers, which compute, and one
that does nothing but copy tiles from global to shared memory (TMA), ahead of
the consumers. Tiles go through rings of slots in shared memory, with two
barriers per slot: "ready", which a copy completes, and "free", at which every
consumer arrives once it has read the slot.

Shapes as in `hopper`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.products import across, times
from moh_jax.ops.kernels.sizes import Tile

# Rows of a consumer's part of a tile: what one product instruction takes.
PART = 64
# Layouts of arrays in the registers of a warpgroup.
_MATRIX = plgpu.Layout.WGMMA
_PER_ROW, _PER_COLUMN = _MATRIX.reduce(1), _MATRIX.reduce(0)


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


@dataclasses.dataclass(frozen=True)
class RingType:
  """Shape of a ring; one copy fills each buffer of a slot.

  Attributes:
    slots: number of slots.
    buffers: shape and dtype of each buffer of a slot. Matrices are stored for
      the tensor cores.
  """

  slots: int
  buffers: tuple[jax.ShapeDtypeStruct, ...]

  def scratch(self, consumers: int) -> tuple:
    """Types of the arguments of `Ring`, for so many consumers."""
    buffers = tuple(
      shared((self.slots, *x.shape), x.dtype) for x in self.buffers
    )
    ready, free = (
      plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.slots)
      for arrivals in (len(buffers), consumers)
    )
    return buffers, ready, free


def shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
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


@dataclasses.dataclass(frozen=True)
class Program:
  """The tiles of one kernel of one call, and the steps its programs share.

  Attributes:
    problem: the call.
    tile: sizes.
  """

  problem: Problem
  tile: Tile

  @property
  def rows(self) -> int:
    """Rows of a tile, r."""
    return self.tile.rows

  @property
  def keys(self) -> int:
    """Keys of a tile, L."""
    return self.tile.keys

  @property
  def key_tiles(self) -> int:
    """Tiles of keys, J; the last may have fewer than L keys."""
    return pl.cdiv(self.problem.keys, self.keys)

  @property
  def exponent_scale(self) -> float:
    """Factor of `logits` that turns them into exponents of 2."""
    return self.problem.log2_scale if self.problem.scale > 0 else 1.0

  def logits(self, products: jax.Array) -> jax.Array:
    """Applies a scale of at most 0: largest logits must be largest before."""
    if self.problem.scale > 0:
      return products
    return products * self.problem.log2_scale

  def weights(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
    """exp2(logits * exponent_scale - shift)."""
    return jnp.exp2(logits * self.exponent_scale - shift)

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

  def zeros(self, columns: int) -> jax.Array:
    """Initial sums of a consumer's rows, [PART, columns] float32."""
    return self.as_matrix(jnp.zeros((PART, columns), jnp.float32))

  def per_row(self, value: float) -> jax.Array:
    """A number for each of a consumer's rows, [PART] float32."""
    return self._laid_out(jnp.full((PART,), value, jnp.float32), _PER_ROW)

  def load_rows(self, x: Any, first: jax.Array) -> jax.Array:
    """Loads a consumer's rows of a matrix [X, D] in global memory."""
    return self._load(x.at[pl.ds(first, PART)], _MATRIX)

  def load_per_row(self, x: Any, first: jax.Array) -> jax.Array:
    """Loads the numbers of a consumer's rows from an array [X]."""
    return self._load(x.at[pl.ds(first, PART)], _PER_ROW)

  def load_per_column(self, x: Any) -> jax.Array:
    """Loads a number per column of the logits."""
    return self._load(x, _PER_COLUMN)

  def as_matrix(self, x: jax.Array) -> jax.Array:
    """Spreads a matrix over the registers as results of products are."""
    return self._laid_out(x, _MATRIX)

  def _laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
    return x if self.problem.interpret else plgpu.layout_cast(x, layout)

  def _load(self, x: Any, layout: Any) -> jax.Array:
    if self.problem.interpret:
      return x[...]
    return plgpu.load(x, *_WHOLE, layout=layout, optimized=False)


# JAX 0.10 demands an index, JAX 0.11 deprecates it.
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()


def loop(begin: Any, end: Any, step: Callable, carry: Any) -> Any:
  """Runs carry = step(i, carry) for int32 i."""
  begin, end = (jnp.asarray(x, jnp.int32) for x in (begin, end))
  return lax.fori_loop(begin, end, step, carry)


def spread(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
  """Repeats a number per row (axis 0) or per column (axis 1) over a matrix."""
  return lax.broadcast_in_dim(x, shape, (axis,))


row = functools.partial(spread, axis=0)
column = functools.partial(spread, axis=1)
