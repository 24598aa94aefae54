"""Attention of the active heads through cuDNN's fused kernels.

Every head of every sequence becomes a sequence of its own, which holds the
tokens that use the head; cuDNN is told its length. cuDNN's causal mask counts
queries by their index in that sequence, which is not their token's position, so
causal attention computes all heads instead.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T sequences.
"""

import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.head_blocks import (
  ActiveHeads,
  gather_rows,
  head_blocks,
  scatter_rows,
)
from moh_jax.ops.visible import Visible


def cudnn_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  visible: Visible,
  active: ActiveHeads | None,
  scale: float,
  *,
  backend: str = "cudnn",
) -> jax.Array:
  """Softmax attention by `jax.nn.dot_product_attention`.

  Args:
    q: [B, N, H, D] bfloat16 or float16 for cuDNN.
    k: [B, M, K, D].
    v: [B, M, K, D].
    bias: broadcastable to [B, H, N, M], or None.
    visible: which keys a query sees.
    active: the active heads; None is every head. With a bias, segments or a
      causal mask all heads are computed.
    scale: factor of the logits.
    backend: "cudnn", or "xla" for tests without a GPU.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  attend = functools.partial(
    jax.nn.dot_product_attention, scale=scale, implementation=backend
  )
  packs = active is not None and bias is None
  if packs and not visible.causal and visible.segments is None:
    return _packed(q, k, v, visible, active, attend)
  causal = visible.causal and q.shape[1] == k.shape[1]
  if causal:  # cuDNN applies this mask itself and skips hidden tiles
    visible = Visible(visible.key_mask, visible.segments)
  mask = visible.mask(q.shape[1], k.shape[1])
  out = attend(q, k, v, bias=bias, mask=mask, is_causal=causal)
  if mask is None:
    return out
  if causal:
    mask = mask & jnp.tri(q.shape[1], dtype=bool)[None, None]
  seen = mask.any(-1).swapaxes(1, 2)[..., None]  # [B or 1, N or 1, 1, 1]
  return jnp.where(seen, out, 0)


def _packed(q, k, v, visible, active, attend):
  tokens, heads = q.shape[1:3]
  blocks = head_blocks(active, tokens)
  rows = gather_rows(q, blocks).reshape(-1, tokens, 1, q.shape[3])
  lengths = (blocks.token < tokens).sum(-1, dtype=jnp.int32)
  group = blocks.head // (heads // k.shape[2])
  keys, values = (
    x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3])[group]
    for x in (k, v)
  )
  mask = None
  if visible.key_mask is not None:
    mask = visible.key_mask[blocks.head // heads][:, None, None]
  out = attend(
    rows,
    keys,
    values,
    mask=mask,
    query_seq_lengths=lengths,
    key_value_seq_lengths=jnp.full_like(lengths, k.shape[1]),
  )
  if mask is not None:
    out = jnp.where(mask.any(-1, keepdims=True), out, 0)
  return scatter_rows(out.reshape(-1, v.shape[3]), blocks, heads)
