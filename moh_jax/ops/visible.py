"""Which keys a query sees.

Shapes: B batch, N queries, M keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
  """Which keys a query sees; what is None hides nothing.

  Attributes:
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees the keys of its segment
      (documents packed into one sequence).
    causal: query n sees the keys up to n + M - N: with fewer queries than keys
      the queries are the last ones.
  """

  key_mask: jax.Array | None = None
  segments: jax.Array | None = None
  causal: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def everything(self) -> bool:
    """Whether nothing is hidden."""
    return self.key_mask is None and self.segments is None and not self.causal

  def mask(self, num_queries: int, num_keys: int) -> jax.Array | None:
    """All in one, [B or 1, 1, N or 1, M]; None sees everything."""
    masks = []
    if self.key_mask is not None:
      masks.append(self.key_mask[:, None, None, :])
    if self.segments is not None:
      equal = self.segments[:, :, None] == self.segments[:, None, :]
      masks.append(equal[:, None])
    if self.causal:
      last = num_keys - num_queries
      masks.append(jnp.tri(num_queries, num_keys, last, bool)[None, None])
    return functools.reduce(jnp.logical_and, masks) if masks else None
