"""The queries of the heads that tokens use, as fewer heads without gaps.

Where a token uses as many query heads of every key/value head, j for each, its
queries are j * K heads that read the same keys and values: attention to them is
stock attention, on j * K / H of the work, with static shapes and no table.

For instance, of 2 key/value heads with 3 query heads each, a token uses heads 0
and 2, and 3 and 5; they become heads 0, 1 and 2, 3.

Shapes: B batch, N tokens, H heads, K key/value heads, G = H / K, D head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moh_jax.ops.head_blocks import ActiveHeads


@dataclasses.dataclass(frozen=True)
class PickedHeads:
  """Where the heads of a token go.

  Attributes:
    place: [B, N, K, G] int32 place of each head among the j of its key/value
      head; j or more for those that the token does not use.
    count: j.
  """

  place: jax.Array
  count: int

  @classmethod
  def of(cls, active: ActiveHeads) -> "PickedHeads":
    """The places of active heads, which have `parts` above 1."""
    *lead, heads = active.mask.shape
    mask = active.mask.reshape(*lead, active.parts, heads // active.parts)
    places, before = [], jnp.zeros(mask.shape[:-1], jnp.int32)
    for head in range(mask.shape[-1]):
      places.append(jnp.where(mask[..., head], before, heads))
      before += mask[..., head]
    count = active.max_per_token // active.parts
    return cls(jnp.stack(places, axis=-1), count)

  def queries(self, q: jax.Array) -> jax.Array:
    """Picks heads.

    Args:
      q: [B, N, H, D].

    Returns:
      [B, N, K * j, D]; 0 where a token has fewer heads.
    """
    *lead, parts, size = self.place.shape
    q = q.reshape(*lead, parts, size, q.shape[-1])
    picked = [
      sum(self._where(place, head, q[..., head, :]) for head in self._of(place))
      for place in range(self.count)
    ]
    return jnp.stack(picked, axis=-2).reshape(*lead, -1, q.shape[-1])

  def spread(self, out: jax.Array) -> jax.Array:
    """Puts outputs where the heads were.

    Args:
      out: [B, N, K * j, D].

    Returns:
      [B, N, H, D]; 0 for heads that a token does not use, and NaN for a token
      with more heads of a key/value head than j.
    """
    *lead, parts, size = self.place.shape
    out = out.reshape(*lead, parts, self.count, out.shape[-1])
    heads = [
      sum(
        self._where(place, head, out[..., place, :])
        for place in range(self.count)
        if head in self._of(place)
      )
      for head in range(size)
    ]
    used = self.place < parts * size
    too_many = (used & (self.place >= self.count)).any((-1, -2))
    out = jnp.stack(heads, axis=-2).reshape(*lead, -1, out.shape[-1])
    return jnp.where(too_many[..., None, None], jnp.nan, out)

  def _of(self, place: int) -> range:
    """Heads that can be at a place."""
    return range(place, self.place.shape[-1])

  def _where(self, place: int, head: int, x: jax.Array) -> jax.Array:
    """[B, N, K, D] where the head is at the place, else 0."""
    return jnp.where(self.place[..., head, None] == place, x, 0)
