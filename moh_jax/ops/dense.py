"""Attention of every head, with all logits in memory at once.

The form for short sequences, and for accelerators where no kernel is used: XLA
fuses the steps.

Shapes: B batch, N queries, M keys (slots of a cache), n new tokens, H query
heads, K key/value heads, D head dim.
"""

import math

import jax
import jax.numpy as jnp

from moh_jax.ops.basics import einsum_float32, unnormalized_softmax
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.call import Call
from moh_jax.ops.target import on_one_device


def dense_attention(call: Call) -> jax.Array:
  """Softmax attention of every head through all logits, [B, H, N, M] float32.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  batch, queries, heads, dim = call.q.shape
  keys, groups = call.k.shape[1:3]
  mask = call.visible.mask(queries, keys)
  # On one device batch and key/value heads are one axis, which makes the CPU's
  # batched products twice as fast; a mesh that splits both needs them apart.
  lead = (batch * groups,) if on_one_device() else (batch, groups)
  # The queries of all heads that read the same keys are rows of one product.
  q = call.q.reshape(batch, queries, groups, -1, dim).transpose(0, 2, 3, 1, 4)
  q = q.reshape(*lead, -1, dim)
  k, v = (x.swapaxes(1, 2).reshape(*lead, keys, dim) for x in (call.k, call.v))
  # Autodiff does the same products for float32, and has forward mode too.
  arrays = (call.q, call.k, call.v)
  plain = all(x.dtype == jnp.float32 for x in arrays)
  multiply, mix = (_multiply, _mix) if plain else (_logits, _mix_values)
  logits = multiply(q, k)
  logits = logits.reshape(batch, heads, queries, keys) * call.scale
  if call.bias is not None:
    logits = logits + call.bias
  if mask is not None:
    logits = jnp.where(mask, logits, -jnp.inf)
  # Dividing after the product with the values saves one pass over the logits.
  masked = mask is not None or call.bias is not None
  weights, total, _ = unnormalized_softmax(logits, masked=masked)
  out = mix(weights.reshape(*q.shape[:-1], keys), v)
  out = out.reshape(batch, heads, queries, dim) / total
  return out.astype(v.dtype).swapaxes(1, 2)


def cached_dense_attention(
  q: jax.Array, cache: LayerCache, slots: Slots
) -> jax.Array:
  """Attention of new tokens to a cache, every head.

  Args:
    q: [B, n, H, D].
    cache: keys and values [B, K, M, D] or [B * K, M, D].
    slots: which slots each new token sees.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.
  """
  batch, new, heads, dim = q.shape
  *lead, length, _ = cache.k.shape
  groups = math.prod(lead) // batch
  # A float32 cache stays float32, also where queries are bfloat16.
  dtype = jnp.promote_types(q.dtype, cache.k.dtype)
  # One product per key/value head: its rows are the queries that read the head,
  # of all new tokens, r = n * H / K.
  grouped = q.reshape(batch, new, groups, -1, dim).transpose(0, 2, 1, 3, 4)
  grouped = grouped.reshape(*lead, -1, dim).astype(dtype)
  logits = einsum_float32("...rd,...md->...rm", grouped, cache.k.astype(dtype))
  visible = jnp.repeat(slots.visible(new, length), heads // groups, axis=1)
  visible = jnp.repeat(visible[:, None], groups, axis=1).reshape(logits.shape)
  logits = jnp.where(visible, logits * dim**-0.5, -jnp.inf)
  weights, total, _ = unnormalized_softmax(logits, masked=True)
  out = einsum_float32(
    "...rm,...md->...rd", weights.astype(dtype), cache.v.astype(dtype)
  )
  out = (out / total).astype(q.dtype)
  out = out.reshape(batch, groups, new, -1, dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(batch, new, heads, dim)


# Both products have float32 results, so their gradients arrive in float32. They
# are rounded to the inputs' dtype before the products of the backward pass:
# autodiff would multiply float32 by bfloat16, at a fraction of the speed.
def _multiply(q: jax.Array, k: jax.Array) -> jax.Array:
  """Multiplies q [..., n, D] and k [..., m, D] to float32 [..., n, m]."""
  return einsum_float32("...nd,...md->...nm", q, k)


_logits = jax.custom_vjp(_multiply)


def _logits_backward(saved: tuple, grad: jax.Array) -> tuple:
  q, k = saved
  grad = grad.astype(jnp.result_type(q, k))
  dq = jnp.einsum("...nm,...md->...nd", grad, k).astype(q.dtype)
  return dq, jnp.einsum("...nm,...nd->...md", grad, q).astype(k.dtype)


_logits.defvjp(lambda q, k: (_logits(q, k), (q, k)), _logits_backward)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Multiplies weights [..., n, m] and v [..., m, D] to float32 [..., n, D]."""
  return einsum_float32("...nm,...md->...nd", weights.astype(v.dtype), v)


_mix_values = jax.custom_vjp(_mix)


def _mix_forward(weights: jax.Array, v: jax.Array) -> tuple:
  weights = weights.astype(v.dtype)
  return _mix(weights, v), (weights, v)


def _mix_backward(saved: tuple, grad: jax.Array) -> tuple:
  weights, v = saved
  grad = grad.astype(v.dtype)
  dv = jnp.einsum("...nm,...nd->...md", weights, grad)
  return einsum_float32("...nd,...md->...nm", grad, v), dv


_mix_values.defvjp(_mix_forward, _mix_backward)
