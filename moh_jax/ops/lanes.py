"""How heads lie in the vector lanes of a TPU.

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

Shapes: B batch, N tokens, H heads, D head dim, m heads of a set, S sets, W
lanes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from moh_jax.ops.placement import HeadPlacement
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
  x = x.reshape(*x.shape[:-1], x.shape[-1] // count, count, 1)
  out = x[..., 0, :]
  ones = [1] * (x.ndim - 2)
  # Place by place: a masked sum over places compiles to more memory on a TPU.
  for i in range(1, count):
    own = in_place(jnp.full(ones, i), count, dim)
    out = jnp.where(own, x[..., i, :], out)
  return out


@dataclasses.dataclass(frozen=True)
class HeadLayout:
  """How the arrays of a layer hold its heads: one value for all of its parts.

  Attributes:
    dim: D, width of a head.
    width: that of heads in arrays, with zeros after a head's own numbers.
    sets: for each number of heads that an array of the layer has, m; those that
      are missing stand alone.
    placement: the order in which devices compute the heads; None is the order
      of the parameters.
  """

  dim: int
  width: int
  sets: tuple[tuple[int, int], ...] = ()
  placement: HeadPlacement | None = None

  def count(self, heads: int) -> int:
    """Heads of a set, m, in an array of so many heads."""
    return dict(self.sets).get(heads, 1)

  def dealt(self, x: jax.Array) -> jax.Array:
    """Brings numbers per head, [..., H], to the order of the devices."""
    if self.placement is None:
      return x
    return x[..., self.placement.order(x.shape[-1])]

  def undealt(self, x: jax.Array) -> jax.Array:
    """Brings numbers per head, [..., H], back to the order of the layer."""
    if self.placement is None:
      return x
    return x[..., np.argsort(self.placement.order(x.shape[-1]))]


def rotate_in_lanes(
  x: jax.Array, cos: jax.Array, sin: jax.Array, count: int
) -> jax.Array:
  """Rotates heads, their halves exchanged by a matrix product.

  Halves of a head are not whole rows of the lanes: taken apart, each would be
  stored in another order. A product with a permutation is exact.

  Args:
    x: [B, N, H, D], possibly wider, with zeros after the first D.
    cos: [B, N, D / 2] of the angles.
    sin: [B, N, D / 2].
    count: m.
  """
  sets = fill_lanes(x, count)
  dim = 2 * cos.shape[-1]
  padding = x.shape[-1] - dim
  swap = np.pad(np.roll(np.eye(dim), dim // 2, axis=0), (0, padding))
  swap = np.kron(np.eye(count), swap)
  # One matrix per set: the remat policy "dots" would keep the result of a
  # product without batch dimensions, which costs less to compute again.
  swap = jnp.broadcast_to(
    jnp.asarray(swap, x.dtype), (sets.shape[2], *swap.shape)
  )
  swapped = jnp.einsum(
    "bnsw,swv->bnsv", sets, swap, precision=jax.lax.Precision.HIGHEST
  )
  rest = jnp.zeros((*cos.shape[:-1], padding), cos.dtype)
  cos = jnp.concatenate([cos, cos, rest] * count, axis=-1)[:, :, None]
  sin = jnp.concatenate([-sin, sin, rest] * count, axis=-1)[:, :, None]
  sets, swapped = (part.astype(jnp.float32) for part in (sets, swapped))
  return (sets * cos + swapped * sin).astype(x.dtype).reshape(x.shape)
