"""Attention of new tokens to a key/value cache, in its several forms.

Shapes: B batch, n new tokens, H query heads, K key/value heads, M slots, D head
dim.
"""

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import choose_cached_form, kernel_options
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels.decode import kernel_decode
from moh_jax.ops.products import einsum_float32
from moh_jax.ops.softmax import unnormalized_softmax
from moh_jax.ops.target import target


def cached_attention(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  *,
  active: ActiveHeads | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of new tokens to the slots of a cache.

  Logits are scaled by D ** -0.5.

  Args:
    q: [B, n, H, D] queries of the new tokens, after RoPE.
    cache: keys and values, those of the new tokens among them.
    slots: which slots each new token sees; `first` is not None.
    active: the heads that tokens use; None is every head. The outputs of other
      heads are finite and otherwise undefined; a gate of 0 makes them 0. A text
      whose token has more than `active.max_per_token` gets NaN from "kernel".
    implementation: one of `attention_forms.IMPLEMENTATIONS`. "kernel" reads
      only the heads that tokens use and the slots that they see, for one new
      token per text and without gradients; "auto" is the same on GPUs and TPUs.
      All others read the whole cache.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  batch, new, heads, dim = q.shape
  if active is not None:
    chex.assert_shape(active.mask, (batch, new, heads))
  form = choose_cached_form(implementation, target(), new=new, head_dim=dim)
  if form == "dense":
    return _dense(q, cache, slots)
  first = slots.first.astype(jnp.int32)
  end = jnp.broadcast_to(slots.start + 1, first.shape).astype(jnp.int32)
  options = kernel_options(target())
  active, factor = (None, 1.0) if active is None else active.bounded()
  out = kernel_decode(q, cache, first, end, active, dim**-0.5, **options)
  return factor * out


def _dense(q: jax.Array, cache: LayerCache, slots: Slots) -> jax.Array:
  """Computes every head, with all logits in memory at once."""
  batch, new, heads, dim = q.shape
  visible = slots.visible(new, cache.k.shape[2])
  groups = cache.k.shape[1]
  dtype = q.dtype
  if cache.k_scale is None:  # keep a float32 cache in float32, not in q's dtype
    dtype = jnp.promote_types(dtype, cache.k.dtype)
  # One product per key/value head: its rows are the queries that read the head,
  # of all new tokens.
  grouped = q.reshape(batch, new, groups, -1, dim).transpose(0, 2, 1, 3, 4)
  grouped = grouped.reshape(batch, groups, -1, dim)  # [B, K, n * H / K, D]
  grouped = grouped.astype(dtype)
  logits = einsum_float32("bkrd,bkmd->bkrm", grouped, cache.k.astype(dtype))
  if cache.k_scale is not None:
    logits = logits * cache.k_scale
  rows = jnp.repeat(visible, heads // groups, axis=1)[:, None]  # [B, 1, r, M]
  logits = jnp.where(rows, logits * dim**-0.5, -jnp.inf)
  weights, total, _ = unnormalized_softmax(logits, masked=True)
  if cache.v_scale is not None:
    weights = weights * cache.v_scale
  out = einsum_float32(
    "bkrm,bkmd->bkrd", weights.astype(dtype), cache.v.astype(dtype)
  )
  out = (out / total).astype(q.dtype)
  out = out.reshape(batch, groups, new, -1, dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(batch, new, heads, dim)
