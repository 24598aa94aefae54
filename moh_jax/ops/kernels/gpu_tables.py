"""Which rows and keys of a causal attention see each other, block by block.

Tables of bounds for the loops of the GPU kernels: where a loop begins, where
it needs a mask, where it ends. Rows are in parts of r, keys in blocks of L.

Shapes: B batch, H query heads, P parts of all rows, J blocks of keys.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import Problem


def keys_of_rows(
  problem: Problem, rows: int, keys: int
) -> tuple[jax.Array, jax.Array]:
  """Blocks of keys at the start that every part of the rows sees.

  Args:
    problem: the call.
    rows: r.
    keys: L.

  Returns:
    How many all of its rows see whole, and how many any of them may see, two
    of [P] int32.
  """
  least, most = problem.reach(rows)
  return least // keys, pl.cdiv(most, keys)


def rows_of_keys(
  problem: Problem, rows: int, keys: int
) -> tuple[jax.Array, jax.Array]:
  """Parts of every head that see a block of keys: they are its last ones.

  Args:
    problem: the call.
    rows: r.
    keys: L.

  Returns:
    The first part of which any row sees any of the keys, and the first of
    which all rows see all of them, two of [B * H, J] int32.
  """
  first = problem.blocks.first * (problem.rows // rows)
  least, most = problem.reach(rows)
  # Parts without rows come last, as if they saw everything.
  most = jnp.maximum(least, most)
  start = jnp.arange(0, problem.keys, keys, dtype=jnp.int32)
  end = jnp.minimum(start + keys, problem.keys)
  return _search(most, first, start + 1), _search(least, first, end)


def _search(values: jax.Array, first: jax.Array, least: jax.Array) -> jax.Array:
  """The first place of every range whose value is at least some number.

  Args:
    values: [P] int32, ascending within ranges.
    first: [X + 1] int32, where ranges start, and the end of the last.
    least: [J] int32, the numbers.

  Returns:
    [X, J] int32; the end of the range where there is none.
  """
  shape = len(first) - 1, len(least)
  low, high = (
    jnp.broadcast_to(x[:, None], shape) for x in (first[:-1], first[1:])
  )
  for _ in range(len(values).bit_length()):
    middle = (low + high) // 2
    below = values[jnp.minimum(middle, len(values) - 1)] < least
    low, high = (
      jnp.where((low < high) & below, middle + 1, low),
      jnp.where((low < high) & ~below, middle, high),
    )
  return low
