"""Pairs to rows and back on a TPU, with whole rows of vector lanes.

Arrays of pairs are read and written as [B, S, N, W]: in this order XLA for TPUs
computes them, and wants them for the products after. A row holds its own head's
numbers in the lanes where the head's key/value head has its keys, and 0 in the
others, which therefore add nothing to the logits. Of a result only the lanes of
the row's own head are meant.

Shapes: B batch, N queries, H query heads, D head dim, m heads of a set,
S = H / m sets of query heads, W = m * D lanes, T blocks, R rows of a block.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.lanes import fill_lanes, in_place


def gather(problem: Problem, x: jax.Array) -> jax.Array:
  """Reorders pairs [B, N, H, D] to rows [T * R, W]; 0 in empty rows.

  Args:
    problem: the call, with keys [B, M, K / m, W].
    x: of the pairs.
  """
  tokens, dim = x.shape[1], x.shape[3]
  count = problem.head_dim // dim
  blocks = problem.blocks
  head, token = blocks.head[:, None], blocks.token
  index = head // count * tokens + jnp.minimum(token, tokens - 1)
  sets = fill_lanes(x, count).swapaxes(1, 2).reshape(-1, problem.head_dim)
  rows = jnp.take(sets, index, axis=0, mode="clip")  # [T, R, W]
  inside = (token < tokens)[..., None]
  if count > 1:
    held = head % count
    wanted = head // (problem.group // count) % count
    rows = _moved(rows, (wanted - held)[..., None], problem, dim)
    inside = inside & in_place(wanted, count, dim)
  rows = jnp.where(inside, rows, jnp.zeros((), x.dtype))
  return rows.reshape(-1, problem.head_dim)


def scatter(problem: Problem, rows: jax.Array, dim: int) -> jax.Array:
  """Reorders rows [T * R, W] to pairs [B, N, H, D]; 0 if inactive.

  Args:
    problem: the call, with keys [B, M, K / m, W].
    rows: results of a kernel.
    dim: D.
  """
  batch, tokens, heads = problem.blocks.row.shape
  count = problem.head_dim // dim
  sets = heads // count

  def by_place(x: jax.Array) -> jax.Array:
    """Shapes [B, N, H] as [m, B, S, N]."""
    x = x.reshape(batch, tokens, sets, count)
    return x.transpose(3, 0, 2, 1)

  row = by_place(problem.blocks.row)
  active = by_place(problem.blocks.active)[..., None]
  out = jnp.zeros((batch, sets, tokens, problem.head_dim), rows.dtype)
  for i in range(count):
    taken = jnp.take(rows, row[i], axis=0, mode="clip")
    head = np.arange(sets) * count + i
    held = head // (problem.group // count) % count
    taken = _moved(taken, (i - held)[None, :, None, None], problem, dim)
    own = in_place(jnp.full((1, 1, 1), i), count, dim)
    out = jnp.where(active[i] & own, taken, out)
  return out.swapaxes(1, 2).reshape(batch, tokens, heads, dim)


def _moved(
  x: jax.Array, places: jax.Array | np.ndarray, problem: Problem, dim: int
) -> jax.Array:
  """Moves what is in the lanes of one place to those of another.

  Args:
    x: [..., W].
    places: by how many places, broadcastable to x.
    problem: the call.
    dim: D, lanes of a place.
  """
  count = problem.head_dim // dim
  if problem.group == count:  # a query head has the place of its key/value head
    return x
  out = x
  for i in range(1, count):
    out = jnp.where(places % count == i, jnp.roll(x, i * dim, -1), out)
  return out
