"""Key/value caches of text generation.

A slot holds one token's keys and values; a text's tokens stand in slots side by
side. Texts of different lengths may begin at different slots, so that all write
the same slot at the same time, or each may write a slot of its own. Heads come
before slots: a head's keys lie side by side in memory, as the product with its
queries reads them.

Shapes: B batch, n new tokens, K key/value heads, M slots, D head dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """Keys and values of one layer.

  Attributes:
    k: [B, K, M, D] keys, after RoPE; or [B * K, M, D], see `merge_texts`.
    v: values, of the same shape.
  """

  k: jax.Array
  v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """Which slots of a cache new tokens are written to, and which they see.

  A new token sees the slots of its text up to its own. For instance, the token
  after a prompt of 4 in slots 1 to 4 is written to slot 5 and sees slots 1 to
  5. One value serves all layers.

  Attributes:
    start: int32 slot of the first new token; the others follow it. [] where it
      is the same in all texts, else [B].
    first: [B] int32 first slot of each text; those before it are padding, which
      no token sees. A text with `first > start` sees nothing. None where the
      cache holds nothing before the new tokens: they see one another as without
      a cache, which is faster.
  """

  start: jax.Array
  first: jax.Array | None = None

  def visible(self, new: int, slots: int) -> jax.Array:
    """Marks the slots that each new token sees, [B, n, M] bool.

    Args:
      new: n.
      slots: M.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    last = jnp.broadcast_to(self.start, self.first.shape)[:, None, None]
    last = last + jnp.arange(new, dtype=jnp.int32)[None, :, None]
    return (slot >= self.first[:, None, None]) & (slot <= last)


def make_cache(
  batch: int, kv_heads: int, slots: int, head_dim: int, dtype: str
) -> LayerCache:
  """Makes an empty cache of one layer.

  Args:
    batch: B.
    kv_heads: K.
    slots: M, tokens of a text at most.
    head_dim: D.
    dtype: "float32" or "bfloat16".

  Returns:
    Zeros, [B, K, M, D].
  """
  shape = batch, kv_heads, slots, head_dim
  return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def merge_texts(caches: Any) -> Any:
  """Makes the heads of all texts one axis, in one cache or a tree of them.

  A loop on a CPU writes such caches in place. Where the axis of texts has one
  element, XLA would copy the whole cache for every token.
  """
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:]), caches)


def split_texts(caches: Any, batch: int) -> Any:
  """Gives caches an axis of `batch` texts again: undoes `merge_texts`."""
  return jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[-2:]), caches)


def write_cache(
  cache: LayerCache, k: jax.Array, v: jax.Array, slot: jax.Array
) -> LayerCache:
  """Puts new keys and values into the slots from `slot` on.

  Args:
    cache: earlier keys and values.
    k: [B, n, K, D] new keys, after RoPE.
    v: [B, n, K, D] new values.
    slot: [] or [B] int32 slot of the first new token. `slot + n` must be at
      most M: beyond it JAX would shift the write to earlier slots.

  Returns:
    The cache with the new keys and values.
  """

  def put(old: jax.Array, new: jax.Array) -> jax.Array:
    new = new.swapaxes(1, 2).astype(old.dtype)
    new = new.reshape(*old.shape[:-2], *new.shape[2:])  # as the cache, n slots
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
    if slot.ndim == 0:
      return update(old, new, slot)
    heads = old.shape[0] // slot.size  # of a text along the first axis
    return jax.vmap(update)(old, new, jnp.repeat(slot, heads))

  return LayerCache(put(cache.k, k), put(cache.v, v))
