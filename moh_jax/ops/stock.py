"""Attention of every head by others' kernels: cuDNN's, and JAX's for TPUs.

They skip no inactive heads. cuDNN can be told how many queries each head has,
but on an H100 its forward pass then takes as long for half of them as for all,
and what its backward pass saves makes it no faster than our kernel.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from moh_jax.ops.basics import ATTENTION
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.lanes import LANES, fill_lanes, heads_in_lanes, in_place

_BLOCK = 512  # queries, and keys, of a tile of splash at most


def cudnn_attention(call: Call, implementation: str = "cudnn") -> jax.Array:
  """Softmax attention by `jax.nn.dot_product_attention`.

  Args:
    call: arrays, bfloat16 or float16 for cuDNN.
    implementation: "cudnn", or "xla" for tests without a GPU.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  q, k, v, bias, visible = call.q, call.k, call.v, call.bias, call.visible
  causal = visible.causal and q.shape[1] == k.shape[1]
  if causal:  # cuDNN applies this mask itself and skips hidden tiles
    visible = Visible(visible.key_mask, visible.segments)
  sizes = q.shape[1], k.shape[1]
  mask = visible.mask(*sizes)
  if bias is not None:
    # cuDNN makes NaN of rows that are all -inf, and gradients that are NaN of
    # a float32 bias beside 16-bit queries (jax-ml/jax#32242).
    bias = bias.astype(q.dtype)
    seen = bias != -jnp.inf
    bias = jnp.where(seen, bias, 0)
    mask = seen if mask is None else mask & seen
  # It broadcasts examples and heads alone (jax-ml/jax#28974).
  bias, mask = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (*x.shape[:2], *sizes)), (bias, mask)
  )
  out = jax.nn.dot_product_attention(
    q, k, v, bias=bias, mask=mask, is_causal=causal, scale=call.scale,
    implementation=implementation,
  )  # fmt: skip
  if mask is None:
    return out
  if causal:
    mask = mask & jnp.tri(q.shape[1], dtype=bool)[None, None]
  seen = mask.any(-1).swapaxes(1, 2)[..., None]  # 1 where sizes may be 1
  return jnp.where(seen, out, 0)


def splash_attention(call: Call, interpret: bool = False) -> jax.Array:
  """Softmax attention by JAX's splash kernel; it skips tiles that none sees.

  Args:
    call: arrays, bfloat16 or float32; N and M are multiples of 128.
    interpret: runs the kernel in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  q, k, v, visible = call.q, call.k, call.v, call.visible
  queries, heads, dim = q.shape[1:]
  keys = k.shape[1]
  mask = masks.FullMask((queries, keys))
  if visible.causal:
    mask = masks.CausalMask((queries, keys), offset=keys - queries)
  tile = _largest_block(queries), _largest_block(keys)
  names = "q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq"
  sizes = {f"block_{name}": size for name, size in zip(names, tile * 3)}
  kernel = splash.make_splash_mha_single_device(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(**sizes),
    residual_checkpoint_name=ATTENTION,
    interpret=interpret,
  )
  # The kernel has no scale; a product in bfloat16 would round the scale too.
  q = (q.astype(jnp.float32) * call.scale).astype(q.dtype)
  count = heads_in_lanes(heads, dim) if heads == k.shape[2] else 1
  q, k, v = (fill_lanes(x, count).swapaxes(1, 2) for x in (q, k, v))
  own = in_place(jnp.arange(count).reshape(1, 1, -1, 1), count, dim)
  if count > 1:
    # A head's other lanes are 0, so the m key heads of a set are read as one;
    # with fewer lanes no less would be computed.
    q = jnp.where(own, q[:, :, None], jnp.zeros((), q.dtype))
    q = q.reshape(len(q), -1, *q.shape[3:])
  out = jax.vmap(kernel)(q, k, v, _segment_ids(queries, keys, visible))
  if count > 1:
    out = out.reshape(len(out), -1, count, *out.shape[2:])
    out = jnp.where(own, out, jnp.zeros((), out.dtype)).sum(2)
  out = out.swapaxes(1, 2).reshape(*call.q.shape).astype(v.dtype)
  if visible.key_mask is None:
    return out
  seen = visible.mask(queries, keys).any(-1)  # [B, 1, N or 1]
  return jnp.where(seen.swapaxes(1, 2)[..., None], out, 0)


def _segment_ids(
  queries: int, keys: int, visible: Visible
) -> splash.SegmentIds | None:
  """Hides keys by their ids: a query sees the keys with its own."""
  key_mask, segments = visible.key_mask, visible.segments
  if key_mask is None and segments is None:
    return None
  if segments is None:
    ids = jnp.zeros((len(key_mask), keys), jnp.int32)
    of_queries = jnp.zeros((len(key_mask), queries), jnp.int32)
  else:
    ids = of_queries = segments.astype(jnp.int32)
  if key_mask is not None:
    ids = jnp.where(key_mask, ids, jnp.iinfo(jnp.int32).min)
  return splash.SegmentIds(of_queries, ids)


def _largest_block(size: int) -> int:
  """The largest multiple of 128 up to the limit that divides a length."""
  blocks = range(LANES, min(size, _BLOCK) + 1, LANES)
  return max(x for x in blocks if size % x == 0)
