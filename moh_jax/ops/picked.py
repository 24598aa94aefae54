"""The queries of the heads that tokens use, as fewer heads without gaps.

Where a token uses as many query heads of every key/value head, j for each, its
queries are j * K heads that read the same keys and values: attention to them is
stock attention, on j * K / H of the work, with static shapes and no table.

For instance, of 2 key/value heads with 3 query heads each, a token uses heads 0
and 2, and 3 and 5; they become heads 0, 1 and 2, 3.

Shapes: B batch, N tokens, H heads, K key/value heads, G = H / K, D head dim.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moh_jax.ops.pairs import ActiveHeads


def attend_picked(
  attend: Callable[[jax.Array], jax.Array],
  q: jax.Array,
  active: ActiveHeads,
  bias: jax.Array | None = None,
) -> jax.Array:
  """Attention to the queries of active heads alone.

  Args:
    attend: maps queries [B, N, K * j, D] to outputs of the same shape.
    q: [B, N, H, D].
    active: heads with `parts` above 1.
    bias: of the logits; None is needed, since heads of tokens have no order.

  Returns:
    [B, N, H, D], see `PickedHeads.spread`.

  Raises:
    ValueError: there is a bias.
  """
  if bias is not None:
    raise ValueError(
      f"bias of shape {bias.shape} must be None where active.parts="
      f"{active.parts} is above 1"
    )
  picked = PickedHeads.of(active)
  return picked.spread(attend(picked.queries(q)))


@dataclasses.dataclass(frozen=True)
class PickedHeads:
  """Where the heads of a token go.

  Attributes:
    place: [B, N, K, G] int32 place of each head among the j of its key/value
      head; G for those that have none.
    wrong: [B, N] bool, whether a token has more than j heads of a key/value
      head.
    count: j.
  """

  place: jax.Array
  wrong: jax.Array
  count: int

  @classmethod
  def of(cls, active: ActiveHeads) -> "PickedHeads":
    """The places of active heads, which have `parts` above 1.

    Where a token uses fewer than j of a key/value head, others have the rest of
    the places. So of G heads, head i can have the places from i + j - G to i.
    """
    *lead, heads = active.mask.shape
    mask = active.mask.reshape(*lead, active.parts, heads // active.parts)
    size, most = mask.shape[-1], min(heads, active.max_per_token)
    used, count = mask.sum(-1, dtype=jnp.int32), most // active.parts
    places, before, missing = [], jnp.zeros_like(used), count - used
    for head in range(size):
      fills = ~mask[..., head] & (missing > 0)
      has = (mask[..., head] | fills) & (before < count)
      places.append(jnp.where(has, before, size))
      before, missing = before + has, missing - fills
    return cls(jnp.stack(places, axis=-1), (used > count).any(-1), count)

  def queries(self, q: jax.Array) -> jax.Array:
    """Picks heads.

    Args:
      q: [B, N, H, D].

    Returns:
      [B, N, K * j, D].
    """
    *lead, parts, size = self.place.shape
    q = q.reshape(*lead, parts, size, q.shape[-1])
    picked = [
      sum(
        self._where(head, place, q[..., head, :])
        for head in range(place, place + size - self.count + 1)
      )
      for place in range(self.count)
    ]
    picked = jnp.stack(picked, axis=-2)
    picked = picked.reshape(*lead, parts * self.count, q.shape[-1])
    # Else XLA picks again wherever attention reads them.
    return lax.optimization_barrier(picked)

  def spread(self, out: jax.Array) -> jax.Array:
    """Puts outputs where the heads were.

    Args:
      out: [B, N, K * j, D].

    Returns:
      [B, N, H, D]; 0 for heads without a place, and NaN for a token with more
      heads of a key/value head than j.
    """
    *lead, parts, size = self.place.shape
    out = lax.optimization_barrier(out)
    out = out.reshape(*lead, parts, self.count, out.shape[-1])
    heads = [
      sum(
        self._where(head, place, out[..., place, :])
        for place in range(
          max(0, head + self.count - size), min(head + 1, self.count)
        )
      )
      for head in range(size)
    ]
    out = jnp.stack(heads, axis=-2)
    out = out.reshape(*lead, parts * size, out.shape[-1])
    return jnp.where(self.wrong[..., None, None], jnp.nan, out)

  def _where(self, head: int, place: int, x: jax.Array) -> jax.Array:
    """[B, N, K, D] where the head has the place, else 0."""
    return jnp.where(self.place[..., head, None] == place, x, 0)
