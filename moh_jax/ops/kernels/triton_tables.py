"""Loop bounds of causal attention in the GPU kernels, tile by tile.

They tell where a loop over tiles begins, which of its tiles need a mask, and
where it ends. Rows are in tiles of r, keys in tiles of L.

Shapes: B batch, H query heads, P tiles of rows, J tiles of keys.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import Problem


def keys_of_rows(
  problem: Problem, rows: int, keys: int
) -> tuple[jax.Array, jax.Array] | None:
  """Bounds of each row tile's loop over the tiles of keys.

  Args:
    problem: the call.
    rows: r.
    keys: L.

  Returns:
    unmasked, the number of leading key tiles that all rows see whole, and end,
    the number that at least one row may see; both [P] int32. None without a
    causal mask.
  """
  if not problem.visible.causal:
    return None
  unmasked, end = problem.key_bounds(rows)
  return unmasked // keys, pl.cdiv(end, keys)


def rows_of_keys(
  problem: Problem, rows: int, keys: int
) -> tuple[jax.Array, jax.Array] | None:
  """Bounds of each key tile's loop over the row tiles of a query head.

  Rows of a head ascend by token, so the tiles that see a key are its last ones.

  Args:
    problem: the call.
    rows: r.
    keys: L.

  Returns:
    begin, the first row tile of which at least one row sees one of the keys,
    and unmasked, the first of which all rows see all keys; both [B * H, J]
    int32. None without a causal mask.
  """
  if not problem.visible.causal:
    return None
  first = problem.blocks.first * (problem.rows // rows)
  unmasked, end = problem.key_bounds(rows)
  # Empty tiles are a head's last: values must ascend, so they see all keys.
  end = jnp.maximum(unmasked, end)
  start = jnp.arange(0, problem.keys, keys, dtype=jnp.int32)
  stop = jnp.minimum(start + keys, problem.keys)
  return _search(end, first, start + 1), _search(unmasked, first, stop)


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
