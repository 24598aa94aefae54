"""Loop bounds of the GPU kernels, tile by tile.

They tell where a loop over tiles begins, which of its tiles need no mask, and
where it ends. Rows are in tiles of r, keys in tiles of L.

Shapes: B batch, H query heads, P tiles of rows, J tiles of keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import Problem


class Bounds(NamedTuple):
  """The tiles of a loop, [begin, end), and those among them without a mask.

  Attributes:
    begin: first tile.
    whole_begin: first tile without a mask.
    whole_end: one more than the last tile without a mask.
    end: one more than the last tile.
      begin <= whole_begin <= whole_end <= end, int32 arrays of one shape.
  """

  begin: jax.Array
  whole_begin: jax.Array
  whole_end: jax.Array
  end: jax.Array


def keys_of_rows(problem: Problem, rows: int, keys: int) -> Bounds:
  """Bounds of each row tile's loop over the tiles of keys, [P].

  Args:
    problem: the call.
    rows: r.
    keys: L.
  """
  begin, end, whole_begin, whole_end = problem.tile_ranges(rows)
  stop = jnp.where(begin < end, pl.cdiv(end, keys), 0)
  start = jnp.minimum(begin // keys, stop)
  return _ordered(start, pl.cdiv(whole_begin, keys), whole_end // keys, stop)


def rows_of_keys(problem: Problem, rows: int, keys: int) -> Bounds:
  """Bounds of each key tile's loop over a query head's row tiles, [B * H, J].

  Rows of a head ascend by token, so the row tiles that read a tile of keys
  follow one another.

  Args:
    problem: the call.
    rows: r.
    keys: L.
  """
  first = problem.blocks.first * (problem.rows // rows)
  begin, end, whole_begin, whole_end = problem.tile_ranges(rows)
  start = jnp.arange(0, problem.keys, keys, dtype=jnp.int32)
  stop = jnp.minimum(start + keys, problem.keys)
  return _ordered(
    _search(end, first, start + 1),
    _search(whole_end, first, stop),
    _search(whole_begin, first, start + 1),
    _search(begin, first, stop),
  )


def _ordered(
  begin: jax.Array, whole_begin: jax.Array, whole_end: jax.Array, end: jax.Array
) -> Bounds:
  """Moves bounds into the order that `Bounds` promises."""
  end = jnp.maximum(begin, end)
  whole_begin = jnp.clip(whole_begin, begin, end)
  return Bounds(begin, whole_begin, jnp.clip(whole_end, whole_begin, end), end)


def _search(
  values: jax.Array, first: jax.Array, targets: jax.Array
) -> jax.Array:
  """Binary search within ranges, as `jnp.searchsorted` in each.

  Args:
    values: [P] int32, ascending within each range.
    first: [X + 1] int32, the start of each range, and the end of the last.
    targets: [J] int32.

  Returns:
    [X, J] int32 index of the range's first value that is at least the target;
    the end of the range if none is.
  """
  shape = len(first) - 1, len(targets)
  low, high = (
    jnp.broadcast_to(x[:, None], shape) for x in (first[:-1], first[1:])
  )
  for _ in range(len(values).bit_length()):
    middle = (low + high) // 2
    below = values[jnp.minimum(middle, len(values) - 1)] < targets[None]
    low, high = (
      jnp.where((low < high) & below, middle + 1, low),
      jnp.where((low < high) & ~below, middle, high),
    )
  return low
