"""Masks of attention, kept apart until a form of attention needs them.

Shapes: B batch, N queries, M keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
  """Which keys a query sees; a mask that is None hides nothing.

  Attributes:
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees only keys of its own
      segment (a document of several packed into one sequence).
    causal: query n sees the keys up to n + M - N, so fewer queries than keys
      are the last ones of the sequence.
  """

  key_mask: jax.Array | None = None
  segments: jax.Array | None = None
  causal: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def everything(self) -> bool:
    """Whether nothing is hidden."""
    return self.key_mask is None and self.segments is None and not self.causal

  def mask(self, num_queries: int, num_keys: int) -> jax.Array | None:
    """One mask [B or 1, 1, N or 1, M] for all; None if nothing is hidden."""
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
