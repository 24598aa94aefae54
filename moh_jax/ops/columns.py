"""The part of a vocabulary that one device of a mesh holds.

An output layer and an embedding have a column, or a row, for every token. Where
devices hold different ones, each computes its part of the logits for the
examples of all of them, and sums over the vocabulary are sums over devices.

The functions are called under `jax.shard_map`. Shapes: B examples of a device.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Columns:
  """Which mesh axes split a vocabulary; by default none does.

  Attributes:
    axes: mesh axes along which devices hold different columns.
    shared: those of them along which devices hold different examples too.
  """

  axes: tuple[str, ...] = ()
  shared: tuple[str, ...] = ()

  def gather(self, x: jax.Array) -> jax.Array:
    """The rows of all S devices along `shared`: [B, ...] to [S * B, ...]."""
    for axis in reversed(self.shared):
      x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    return x

  def scatter(self, x: jax.Array) -> jax.Array:
    """Sums over devices, and keeps its own rows: [S * B, ...] to [B, ...]."""
    for axis in self.shared:
      x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return x

  def own(self, x: jax.Array) -> jax.Array:
    """This device's rows of what it has for all: [S * B, ...] to [B, ...]."""
    if not self.shared:
      return x
    each = len(x) // jax.lax.axis_size(self.shared)
    return jax.lax.dynamic_slice_in_dim(
      x, jax.lax.axis_index(self.shared) * each, each
    )

  def sum(self, x: jax.Array) -> jax.Array:
    """Sums x over the parts of the vocabulary."""
    return jax.lax.psum(x, self.axes) if self.axes else x

  def max(self, x: jax.Array) -> jax.Array:
    """The largest x of all parts of the vocabulary."""
    return jax.lax.pmax(x, self.axes) if self.axes else x

  def place(self, tokens: jax.Array, size: int) -> jax.Array:
    """Index of tokens among this device's columns; -1 if another has them."""
    if not self.axes:
      return tokens
    place = tokens - jax.lax.axis_index(self.axes) * size
    return jnp.where((place >= 0) & (place < size), place, -1)

  def share(self, x: jax.Array) -> jax.Array:
    """This device's part of a sum that all parts of the vocabulary know."""
    return x / jax.lax.axis_size(self.axes) if self.axes else x


ALL = Columns()


def take(
  columns: Columns, table: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Reads rows of a table that devices share.

  Args:
    columns: how they share its rows.
    table: [v, C] the device's rows.
    tokens: [B, N] int32 of this device.
    dtype: of the result.

  Returns:
    [B, N, C] of this device, to be summed over the axes of the vocabulary that
    are not shared.
  """
  place = columns.place(columns.gather(tokens), len(table))
  rows = _read(table, place).astype(dtype)  # of -1 the last one
  if columns.axes:
    rows = jnp.where(place[..., None] >= 0, rows, 0)
  return columns.scatter(rows)


def _read(table: jax.Array, rows: jax.Array) -> jax.Array:
  if table.dtype.itemsize == 2:
    return _read_bits(table, rows)
  return jnp.take(table, rows, axis=0)


@jax.custom_jvp
def _read_bits(table: jax.Array, rows: jax.Array) -> jax.Array:
  """Reads 16-bit rows as integers.

  XLA's CPU compiler reads bfloat16 rows in float32, for which it converts the
  whole table; without the barrier it would do so before a loop of decoding.
  """
  table, rows = jax.lax.optimization_barrier((table, rows))
  bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
  return jax.lax.bitcast_convert_type(bits.take(rows, axis=0), table.dtype)


@_read_bits.defjvp
def _read_bits_jvp(primals, tangents) -> tuple[jax.Array, jax.Array]:
  table, rows = primals
  return _read_bits(table, rows), tangents[0].take(rows, axis=0)
