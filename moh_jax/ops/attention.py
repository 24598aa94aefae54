"""Attention of each head, one function for all implementations.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads (H is a
multiple of K), D head dim. `jax.nn.dot_product_attention` has the same layout
but calls the heads N and the head dim H.
"""

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import (
  AttentionCase,
  choose_form,
  kernel_options,
)
from moh_jax.ops.blocked import blocked_attention
from moh_jax.ops.cudnn import cudnn_attention
from moh_jax.ops.dense import attend_one_by_one, dense_attention
from moh_jax.ops.head_blocks import ActiveHeads, all_blocks, head_blocks
from moh_jax.ops.kernels.attention import kernel_attention
from moh_jax.ops.splash import splash_attention
from moh_jax.ops.target import has_cudnn, on_one_device, target
from moh_jax.ops.visible import Visible


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  bias: jax.Array | None = None,
  key_mask: jax.Array | None = None,
  segments: jax.Array | None = None,
  causal: bool = False,
  scale: float | None = None,
  active: ActiveHeads | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of the active heads, before heads are mixed.

  Args:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    bias: added to the scaled logits, broadcastable to [B, H, N, M]. A key whose
      bias is -inf is not seen.
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees only keys of its own
      segment (a document of several packed into one sequence).
    causal: query n sees the keys up to n + M - N, so fewer queries than keys
      are the last ones of the sequence.
    scale: factor of the logits; None is D ** -0.5.
    active: the heads that each token uses; None is every head. The output of an
      inactive head is unspecified, either 0 or its attention: multiply it by a
      gate of 0. Forms that skip heads return NaN for a sequence in which a
      token has more than `active.max_per_token`.
    implementation: "dense" computes every head and "packed" the active ones,
      both in plain XLA; "kernel" computes the active ones in one Pallas kernel;
      "cudnn" uses cuDNN; "auto" takes the fastest by measurement for the shapes
      and the device (see `attention_forms`).

  Returns:
    [B, N, H, D] in the dtype of v. A query that sees no key gets 0.

  Raises:
    ValueError: the implementation is unknown or does not support the call, or
      H is not a multiple of K.
  """
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  batch, queries, heads, dim = q.shape
  keys = k.shape[1]
  if heads % k.shape[2]:
    raise ValueError(
      f"{heads} query heads are not a multiple of the {k.shape[2]} key/value "
      "heads"
    )
  if active is not None:
    chex.assert_shape(active.mask, (batch, queries, heads))
  case = AttentionCase(
    target=target(),
    batch=batch,
    queries=queries,
    keys=keys,
    num_heads=heads,
    head_dim=dim,
    share=1.0 if active is None else active.share,
    causal=causal,
    masked=segments is not None
    or (causal and (key_mask is not None or queries != keys)),
    biased=bias is not None,
    dtype=q.dtype.name,
    one_device=on_one_device(),
    has_cudnn=has_cudnn(),
  )
  form = choose_form(implementation, case)
  active, factor = active.bounded() if form.packs else (None, 1.0)
  scale = dim**-0.5 if scale is None else scale
  if segments is not None:
    segments = segments.astype(jnp.int32)
  visible = Visible(key_mask, segments, causal)
  if bias is not None:
    bias = jax.lax.broadcast_to_rank(bias, 4)
  if form.name == "dense":
    attend = attend_one_by_one if form.one_by_one else dense_attention
    return attend(q, k, v, bias, visible, scale)
  if form.name == "cudnn":
    return factor * cudnn_attention(q, k, v, bias, visible, active, scale)
  if form.name == "splash":
    return splash_attention(q, k, v, visible, scale)
  if bias is not None:
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], queries, keys))
  if active is None:
    blocks = all_blocks(batch, queries, heads, form.rows)
  else:
    blocks = head_blocks(active, form.rows)
  if form.name == "kernel":
    same = q.dtype == k.dtype == v.dtype
    options = kernel_options(case.target, case.dtype if same else "", dim)
    out = kernel_attention(q, k, v, visible, blocks, scale, **options)
    return factor * out
  dtype = v.dtype
  if case.target.platform == "cpu":
    # XLA for CPUs copies whole 16-bit arrays in every iteration of a loop.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  out = blocked_attention(
    q, k, v, bias, visible, blocks, scale, form.blocks_per_step
  )
  return factor * out.astype(dtype)
