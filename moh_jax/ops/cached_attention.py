"""Attention of new tokens to a cache, behind one signature.

Shapes: B batch, n new tokens, H query heads, K key/value heads, M slots, D head
dim.
"""

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import choose_cached_form, kernels_of
from moh_jax.ops.cache import LayerCache
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels.decode import kernel_decode
from moh_jax.ops.softmax import unnormalized_softmax


def cached_attention(
  q: jax.Array,
  cache: LayerCache,
  visible: jax.Array,
  *,
  scale: float | None = None,
  active: ActiveHeads | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of new tokens to the slots of a cache.

  Args:
    q: [B, n, H, D] rotated queries.
    cache: with their own keys and values in it.
    visible: [B, n, M] bool, the slots that each may see.
    scale: factor of the logits; None is D ** -0.5.
    active: the heads that tokens use; None is every head. What the others give
      is finite and otherwise not defined: a gate of 0 makes it 0.
    implementation: one of `attention_forms.IMPLEMENTATIONS`. "kernel" reads the
      heads that a single new token chose, from caches of floats and without
      gradients; all else reads every head.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  batch, new, heads, dim = q.shape
  if active is not None:
    chex.assert_shape(active.mask, (batch, new, heads))
  scale = dim**-0.5 if scale is None else scale
  form = choose_cached_form(
    implementation, new=new, quantized=cache.k_scale is not None
  )
  if form == "dense":
    return _dense(q, cache, visible, scale)
  platform, interpret = kernels_of(jax.default_backend())
  return kernel_decode(
    q,
    cache.k,
    cache.v,
    visible,
    active,
    scale,
    platform=platform,
    interpret=interpret,
  )


def _dense(
  q: jax.Array, cache: LayerCache, visible: jax.Array, scale: float
) -> jax.Array:
  """Every head, all logits at once."""
  batch, new, heads, dim = q.shape
  groups = cache.k.shape[1]
  dtype = q.dtype
  if cache.k_scale is None:  # a float32 cache is not rounded to read it
    dtype = jnp.promote_types(dtype, cache.k.dtype)
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
