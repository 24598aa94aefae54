"""Key/value caches of autoregressive decoding.

Slots are places along the sequence: all rows of a batch write the same slot at
the same time, so rows of different lengths are padded on the left. Heads come
before slots: a head's keys lie side by side, as its product reads them.

Shapes: B batch, n new tokens, K key/value heads, M slots, D head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

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
  """An empty cache.

  Args:
    batch: B.
    kv_heads: K.
    slots: M.
    head_dim: D.
    dtype: "float32", "bfloat16" or "int8".

  Returns:
    Zeros, [B, K, M, D] and for "int8" scales [B, K, M].
  """
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
