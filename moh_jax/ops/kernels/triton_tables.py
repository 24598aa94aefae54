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
  start = jnp.arange(0, problem.keys, keys, dtype=jnp.int32)
  stop = jnp.minimum(start + keys, problem.keys)
  begin, end, whole_begin, whole_end = problem.token_ranges()
  values = jnp.stack([end, whole_end, whole_begin, begin])
  targets = jnp.stack([start + 1, stop, start + 1, stop])
  # Values ascend by token, so these tokens are the first ones.
  tokens = values[:, :, None] < targets[:, None, :, None]  # [4, B, J, N]
  tokens = tokens.sum(-1, dtype=jnp.int32)
  rank = problem.blocks.rank
  batch = jnp.arange(problem.batch)[None, :, None]
  below = rank[batch, jnp.maximum(tokens - 1, 0)]  # rows of each head
  below = jnp.where((tokens > 0)[..., None], below, 0)  # [4, B, J, H]
  count = rank[None, :, -1:]
  next_tile = pl.cdiv(below, rows)
  # The tile of the next row; after the last tile if there is no such row.
  tile = jnp.where(below < count, below // rows, next_tile)
  bounds = _ordered(tile[0], next_tile[1], tile[2], next_tile[3])
  first = problem.blocks.first[:-1].reshape(problem.batch, 1, -1)
  first = first * (problem.rows // rows)
  return Bounds(
    *((first + x).swapaxes(1, 2).reshape(-1, len(start)) for x in bounds)
  )


def _ordered(
  begin: jax.Array, whole_begin: jax.Array, whole_end: jax.Array, end: jax.Array
) -> Bounds:
  """Moves bounds into the order that `Bounds` promises."""
  end = jnp.maximum(begin, end)
  whole_begin = jnp.clip(whole_begin, begin, end)
  return Bounds(begin, whole_begin, jnp.clip(whole_end, whole_begin, end), end)
