"""Attention of one new token to a cache, reading the active heads alone.

The cache is read in place. Each text has a list of the key/value heads that its
token uses; a kernel's grid goes over the lists' entries and over the slots that
the token sees. Heads that no query chose, and slots outside the text, are not
read.

Shapes: B texts, H query heads, K key/value heads, G query heads of a key/value
head, M slots, D head dim.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels import tpu_decode, triton_decode
from moh_jax.ops.kernels.attention import readable
from moh_jax.ops.kernels.backends import kernel_options
from moh_jax.ops.kernels.problem import DecodeProblem, head_list
from moh_jax.ops.target import target

# By back end of Pallas.
_KERNELS = {"triton": triton_decode, "mosaic_tpu": tpu_decode}


def attend_to_cache(
  q: jax.Array, cache: LayerCache, slots: Slots, active: ActiveHeads | None
) -> jax.Array:
  """Attention of one new token per text, on the device that it is traced for.

  Args:
    q: [B, 1, H, D].
    cache: keys and values [B, K, M, D].
    slots: which slots each token sees.
    active: the active heads; None is every head.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot, NaN for texts whose token has too many heads.

  Raises:
    ValueError: a dtype or the head dim is not supported.
  """
  first = slots.first.astype(jnp.int32)
  end = jnp.broadcast_to(slots.start + 1, first.shape).astype(jnp.int32)
  options = kernel_options(target())
  active, factor = (None, 1.0) if active is None else active.bounded()
  scale = q.shape[-1] ** -0.5
  out = kernel_decode(q, cache, first, end, active, scale, **options)
  return factor * out


@jax.enable_x64(False)  # indices in kernels are int32
def kernel_decode(
  q: jax.Array,
  cache: LayerCache,
  first: jax.Array,
  end: jax.Array,
  active: ActiveHeads | None,
  scale: float,
  *,
  backend: str,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of one new token per text, without gradients.

  Sums are float32. Queries and keys are multiplied in the wider of their
  dtypes; a narrower cache is widened as it is read. The scales of an int8 cache
  multiply logits and weights. TPUs have no float16: a float16 cache is copied
  to float32 first.

  Args:
    q: [B, 1, H, D] bfloat16, float16 or float32.
    cache: keys and values [B, K, M, D] in one of these dtypes, or int8 with
      scales; query head h reads key/value head h // (H / K).
    first: [B] int32 first slot that each token sees.
    end: [B] int32 slot after the last one that each token sees.
    active: the active heads; None is every head. A key/value head is read if
      any of its query heads is active.
    scale: factor of the logits.
    backend: of Pallas, "triton" (NVIDIA GPUs) or "mosaic_tpu".
    interpret: runs the kernels in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot.

  Raises:
    ValueError: the back end, a dtype or the head dim is not supported.
  """
  chex.assert_rank((q, cache.k), 4)
  batch, _, heads, dim = q.shape
  kv_heads, slots = cache.k.shape[1:3]
  chex.assert_shape(q, (batch, 1, heads, dim))
  chex.assert_shape((cache.k, cache.v), (batch, kv_heads, slots, dim))
  chex.assert_shape((first, end), (batch,))
  if cache.k_scale is None:
    dtype, k, v = readable(backend, q, cache.k, cache.v)
    cache = dataclasses.replace(cache, k=k, v=v)
  else:
    dtype, *_ = readable(backend, q, q, q)  # holds all values of int8
  shape = batch, kv_heads, heads // kv_heads, dim
  chosen = jnp.broadcast_to((first < end)[:, None, None], shape[:3])
  most = kv_heads
  if active is not None:
    chex.assert_shape(active.mask, (batch, 1, heads))
    chosen = chosen & active.mask.reshape(shape[:3])
    most = min(kv_heads, active.max_per_token)
  problem = DecodeProblem(
    cache,
    head_list(chosen.any(-1), most),
    jnp.maximum(first, 0),
    jnp.minimum(end, slots),
    dtype,
    float(scale),
    interpret,
  )
  out = _KERNELS[backend].attend(problem, q.astype(dtype).reshape(shape))
  out = jnp.where(chosen[..., None], out, 0.0)
  return out.astype(q.dtype).reshape(q.shape)
