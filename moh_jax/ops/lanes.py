"""Heads side by side in the vector lanes of a TPU.

A TPU keeps the last axis of an array in rows of 128 lanes. Narrower heads would
leave lanes empty, so XLA stores [B, N, H, D] with the tokens last instead, and
transposes the arrays before and after every kernel. Where D divides 128,
neighbouring heads share the lanes of a row here: [B, N, S, W] with m = 128 / D
heads in a set, S = H / m sets and W = m * D = 128 lanes.

Whatever takes such an array apart along its lanes, or puts one together, writes
all of it again. So queries, keys and values are separate products on a TPU, and
the halves of heads (RoPE) are never arrays of their own.

Other head dims are padded with zeros where that costs little (`padded_dim`):
the products that make and read the heads do more, but write whole rows.

Shapes: B batch, N tokens, H heads, D head dim, m heads of a set, S sets,
W lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from moh_jax.ops.target import target

LANES = 128


def heads_in_lanes(heads: int, dim: int) -> int:
  """How many neighbouring heads fill the lanes, m; 1 if none do.

  Args:
    heads: H that a device has, a multiple of m.
    dim: D.
  """
  count = LANES // dim if LANES % dim == 0 else 1
  return 1 if heads % count else count


def padded_dim(dim: int) -> int:
  """Width of heads with zeros in the lanes that they leave empty.

  It is D if less than three quarters of the lanes would be the heads' own. The
  wider products then cost more than the copies that they save, by the estimates
  of XLA's compiler for TPU v5e and v6e: 96 as 128 pays, 72 as 128 does not.

  Args:
    dim: D.
  """
  if dim > LANES:
    width = -(-dim // LANES) * LANES
  else:
    width = next(x for x in range(dim, LANES + 1) if LANES % x == 0)
  return width if 4 * dim >= 3 * width else dim


def on_tpu() -> bool:
  """Whether the function that is traced will run on a TPU."""
  return target().platform == "tpu"


def fill_lanes(x: jax.Array, count: int) -> jax.Array:
  """Shapes [..., H, D] as [..., S, W], with m = count heads in a set."""
  *lead, heads, dim = x.shape
  return x.reshape(*lead, heads // count, count * dim)


def in_place(places: jax.Array, count: int, dim: int) -> jax.Array:
  """Whether a lane belongs to a place among the m = count heads of a set.

  Args:
    places: [...] int32, from 0 to m - 1.
    count: m.
    dim: D.

  Returns:
    [..., W] bool.
  """
  places = jnp.asarray(places)[..., None]
  shape = (*[1] * (places.ndim - 1), count * dim)
  return places == lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) // dim


def store_by_head(x: jax.Array) -> jax.Array:
  """Has padded heads [B, N, S, W] stored in the order [B, S, N, W].

  Left to itself, XLA stores results of products with padded weights with the
  tokens last (v6e), as it does without padding. The gradient is stored alike.
  """
  return with_layout_constraint(x, Layout((0, 2, 1, 3)))


def over_lanes(x: jax.Array, count: int, dim: int) -> jax.Array:
  """Repeats one number per head over its lanes.

  Args:
    x: [..., H].
    count: m.
    dim: D.

  Returns:
    [..., S, W]; [..., H, 1], which broadcasts to that, if m = 1.
  """
  x = x.reshape(*x.shape[:-1], -1, count, 1)
  out = x[..., 0, :]
  ones = [1] * (x.ndim - 2)
  # Place by place: a masked sum over places compiles to more memory on a TPU.
  for i in range(1, count):
    own = in_place(jnp.full(ones, i), count, dim)
    out = jnp.where(own, x[..., i, :], out)
  return out
