"""Attention of every head, with all logits in memory at once.

The form for short sequences, and for accelerators where no kernel is used: XLA
fuses the steps.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim.
"""

import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.products import einsum_float32
from moh_jax.ops.softmax import unnormalized_softmax
from moh_jax.ops.target import on_one_device
from moh_jax.ops.visible import Visible


def dense_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  visible: Visible,
  scale: float,
) -> jax.Array:
  """Softmax attention of every head through all logits, [B, H, N, M] float32.

  Args:
    q: [B, N, H, D].
    k: [B, M, K, D].
    v: [B, M, K, D].
    bias: broadcastable to [B, H, N, M], or None.
    visible: which keys a query sees.
    scale: factor of the logits.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  batch, queries, heads, dim = q.shape
  keys, groups = k.shape[1:3]
  mask = visible.mask(queries, keys)
  # On one device batch and key/value heads are one axis, which makes the CPU's
  # batched products twice as fast; a mesh that splits both needs them apart.
  lead = (batch * groups,) if on_one_device() else (batch, groups)
  # The queries of all heads that read the same keys are rows of one product.
  q = q.reshape(batch, queries, groups, -1, dim).transpose(0, 2, 3, 1, 4)
  q = q.reshape(*lead, -1, dim)
  k, v = (x.swapaxes(1, 2).reshape(*lead, keys, dim) for x in (k, v))
  logits = _logits(q, k)
  logits = logits.reshape(batch, heads, queries, keys) * scale
  if bias is not None:
    logits = logits + bias
  if mask is not None:
    logits = jnp.where(mask, logits, -jnp.inf)
  # Dividing after the product with the values saves one pass over the logits.
  masked = mask is not None or bias is not None
  weights, total, _ = unnormalized_softmax(logits, masked=masked)
  out = _mix_values(weights.reshape(*q.shape[:-1], keys), v)
  out = out.reshape(batch, heads, queries, dim) / total
  return out.astype(v.dtype).swapaxes(1, 2)


def attend_one_by_one(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  visible: Visible,
  scale: float,
) -> jax.Array:
  """`dense_attention` of one sequence of the batch after another.

  The logits of a sequence stay in a CPU's caches where those of the batch would
  not. Gradients compute them again, so that they are never all in memory.
  """
  shared = bias is None or bias.shape[0] == 1

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(arrays: tuple) -> jax.Array:
    q, k, v, own, key_mask, segments = jax.tree.map(lambda x: x[None], arrays)
    seen = Visible(key_mask, segments, visible.causal)
    return dense_attention(q, k, v, bias if shared else own, seen, scale)[0]

  own = None if shared else bias
  arrays = (q, k, v, own, visible.key_mask, visible.segments)
  return jax.lax.map(attend, arrays)


# Both products have float32 results, so their gradients arrive in float32. They
# are rounded to the inputs' dtype before the products of the backward pass:
# autodiff would multiply float32 by bfloat16, at a fraction of the speed.
@jax.custom_vjp
def _logits(q: jax.Array, k: jax.Array) -> jax.Array:
  """Multiplies q [..., n, D] and k [..., m, D] to float32 [..., n, m]."""
  return einsum_float32("...nd,...md->...nm", q, k)


def _logits_forward(q: jax.Array, k: jax.Array) -> tuple:
  return _logits(q, k), (q, k)


def _logits_backward(saved: tuple, grad: jax.Array) -> tuple:
  q, k = saved
  grad = grad.astype(q.dtype)
  dq = jnp.einsum("...nm,...md->...nd", grad, k)
  return dq, jnp.einsum("...nm,...nd->...md", grad, q)


_logits.defvjp(_logits_forward, _logits_backward)


@jax.custom_vjp
def _mix_values(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Multiplies weights [..., n, m] and v [..., m, D] to float32 [..., n, D]."""
  return einsum_float32("...nm,...md->...nd", weights.astype(v.dtype), v)


def _mix_forward(weights: jax.Array, v: jax.Array) -> tuple:
  weights = weights.astype(v.dtype)
  return einsum_float32("...nm,...md->...nd", weights, v), (weights, v)


def _mix_backward(saved: tuple, grad: jax.Array) -> tuple:
  weights, v = saved
  grad = grad.astype(v.dtype)
  dv = jnp.einsum("...nm,...nd->...md", weights, grad)
  return einsum_float32("...nd,...md->...nm", grad, v), dv


_mix_values.defvjp(_mix_forward, _mix_backward)
