"""Key/value caches of autoregressive decoding.

Slots are places along the sequence: all rows of a batch write the same slot at
the same time, so rows of different lengths are padded on the left. Heads come
before slots: a head's keys lie side by side, as its product reads them.

Shapes: B batch, n new tokens, H query heads, K key/value heads, M slots, D head
dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moh_jax.ops.softmax import unnormalized_softmax

_INT8_MAX = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """Keys and values of one layer.

  Attributes:
    k: [B, K, M, D], rotated.
    v: [B, K, M, D].
    k_scale: [B, K, M] float32 of int8 keys: key = scale * stored; else None.
    v_scale: of the values.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


def make_cache(
  batch: int, kv_heads: int, slots: int, head_dim: int, dtype: str
) -> LayerCache:
  """An empty cache; dtype is "float32", "bfloat16" or "int8"."""
  values = jnp.zeros((batch, kv_heads, slots, head_dim), dtype)
  if dtype != "int8":
    return LayerCache(values, values)
  scales = jnp.zeros((batch, kv_heads, slots), jnp.float32)
  return LayerCache(values, values, scales, scales)


def write_cache(
  cache: LayerCache, k: jax.Array, v: jax.Array, slot: jax.Array
) -> LayerCache:
  """Puts new keys and values into the slots from `slot` on.

  Args:
    cache: before.
    k: [B, n, K, D].
    v: [B, n, K, D].
    slot: [] int32 of the first new token; n more must fit.

  Returns:
    The cache after.
  """
  stored: dict[str, jax.Array] = {}
  for name, new in (("k", k), ("v", v)):
    new, old = new.swapaxes(1, 2), getattr(cache, name)  # [B, K, n, D]
    if cache.k_scale is not None:
      new, scale = _quantize(new)
      stored[f"{name}_scale"] = jax.lax.dynamic_update_slice(
        getattr(cache, f"{name}_scale"), scale, (0, 0, slot)
      )
    stored[name] = jax.lax.dynamic_update_slice(
      old, new.astype(old.dtype), (0, 0, slot, 0)
    )
  return LayerCache(**stored)


def _quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """[..., D] to int8 and a float32 scale per vector."""
  x = x.astype(jnp.float32)
  scale = jnp.abs(x).max(-1) / _INT8_MAX
  divisor = jnp.where(scale > 0, scale, 1.0)[..., None]
  return jnp.round(x / divisor).astype(jnp.int8), scale


def cached_attention(
  q: jax.Array,
  cache: LayerCache,
  visible: jax.Array,
  *,
  scale: float | None = None,
) -> jax.Array:
  """Softmax attention of new tokens to the slots of a cache.

  Args:
    q: [B, n, H, D] rotated queries.
    cache: with their own keys and values in it.
    visible: [B, n, M] bool, the slots that each may see.
    scale: factor of the logits; None is D ** -0.5.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.
  """
  batch, new, heads, dim = q.shape
  groups = cache.k.shape[1]
  dtype = q.dtype
  if cache.k_scale is None:  # a float32 cache is not rounded to read it
    dtype = jnp.promote_types(dtype, cache.k.dtype)
  scale = dim**-0.5 if scale is None else scale
  # Query heads of a key/value head and new tokens are the rows of one product.
  grouped = q.reshape(batch, new, groups, -1, dim).transpose(0, 2, 1, 3, 4)
  grouped = grouped.reshape(batch, groups, -1, dim)  # [B, K, n * H / K, D]
  grouped = grouped.astype(dtype)
  logits = jnp.einsum(
    "bkrd,bkmd->bkrm",
    grouped,
    cache.k.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  if cache.k_scale is not None:
    logits = logits * cache.k_scale[:, :, None]
  rows = jnp.repeat(visible, heads // groups, axis=1)[:, None]  # [B, 1, r, M]
  logits = jnp.where(rows, logits * scale, -jnp.inf)
  weights, total, _ = unnormalized_softmax(logits, masked=True)
  if cache.v_scale is not None:
    weights = weights * cache.v_scale[:, :, None]
  out = jnp.einsum(
    "bkrm,bkmd->bkrd",
    weights.astype(dtype),
    cache.v.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  out = (out / total).astype(q.dtype)
  out = out.reshape(batch, groups, new, -1, dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(batch, new, heads, dim)
