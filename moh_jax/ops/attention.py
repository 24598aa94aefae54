"""Per-head attention behind one signature.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads (H is a
multiple of K), D head dim. `jax.nn.dot_product_attention` has the same layout
but calls the heads N and the head dim H.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp


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
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of every head, not yet mixed over the heads.

  Args:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    bias: added to the scaled logits, broadcastable to [B, H, N, M].
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees the keys of its segment
      (documents packed into one sequence).
    causal: query n sees the keys up to n + M - N: with fewer queries than keys
      the queries are the last ones.
    scale: factor of the logits; None is D ** -0.5.
    implementation: "dense" computes every head; "auto" picks the best form for
      the shapes and the device.

  Returns:
    [B, N, H, D] in the dtype of v. A query that sees no key gets 0.

  Raises:
    ValueError: the implementation is unknown, or the heads do not group.
  """
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  if q.shape[2] % k.shape[2]:
    raise ValueError(
      f"{q.shape[2]} query heads are not a multiple of the "
      f"{k.shape[2]} key/value heads"
    )
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of "
      f"{tuple(IMPLEMENTATIONS)}"
    )
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  mask = _visible(q.shape[1], k.shape[1], key_mask, segments, causal)
  return IMPLEMENTATIONS[implementation](q, k, v, bias, mask, scale)


def _visible(
  num_queries: int,
  num_keys: int,
  key_mask: jax.Array | None,
  segments: jax.Array | None,
  causal: bool,
) -> jax.Array | None:
  """Combines the masks, broadcastable to [B, 1, N, M]; None sees everything."""
  masks = []
  if key_mask is not None:
    masks.append(key_mask[:, None, None, :])
  if segments is not None:
    masks.append((segments[:, :, None] == segments[:, None, :])[:, None])
  if causal:
    masks.append(jnp.tri(num_queries, num_keys, num_keys - num_queries, bool))
  return functools.reduce(jnp.logical_and, masks) if masks else None


def _dense(q, k, v, bias, mask, scale) -> jax.Array:
  """All logits at once, [B, H, N, M] float32."""
  batch, queries, heads, dim = q.shape
  keys, groups = k.shape[1:3]
  # On one device batch and key/value heads are one axis, which makes the CPU's
  # batched products twice as fast; a mesh that splits both needs them apart.
  mesh = jax.sharding.get_abstract_mesh()
  apart = not mesh.empty and mesh.size > 1
  lead = (batch, groups) if apart else (batch * groups,)
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
  # Normalized after the product with the values: one pass less over M.
  weights, total = unnormalized_softmax(logits, masked=mask is not None)
  out = _mix_values(weights.reshape(*q.shape[:-1], keys), v)
  out = out.reshape(batch, heads, queries, dim) / total
  return out.astype(v.dtype).swapaxes(1, 2)


# Both products give float32 and round what comes back to the inputs' dtype
# before the products of the backward pass: autodiff would multiply float32 by
# bfloat16 there, at a fraction of the speed.
@jax.custom_vjp
def _logits(q: jax.Array, k: jax.Array) -> jax.Array:
  """Q [..., n, D] and k [..., m, D] to float32 [..., n, m]."""
  return _wide("...nd,...md->...nm", q, k)


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
  """Weights [..., n, m] float32 and v [..., m, D] to float32 [..., n, D]."""
  return _wide("...nm,...md->...nd", weights.astype(v.dtype), v)


def _mix_forward(weights: jax.Array, v: jax.Array) -> tuple:
  weights = weights.astype(v.dtype)
  return _wide("...nm,...md->...nd", weights, v), (weights, v)


def _mix_backward(saved: tuple, grad: jax.Array) -> tuple:
  weights, v = saved
  grad = grad.astype(v.dtype)
  dv = jnp.einsum("...nm,...nd->...md", weights, grad)
  return _wide("...nd,...md->...nm", grad, v), dv


_mix_values.defvjp(_mix_forward, _mix_backward)


def _wide(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def unnormalized_softmax(
  logits: jax.Array, *, masked: bool
) -> tuple[jax.Array, jax.Array]:
  """Numerator and denominator of a softmax over the last axis.

  A row of -inf has a denominator of 1 and so gives 0, not NaN.

  Args:
    logits: [..., M] float32, -inf where masked.
    masked: whether any logit may be -inf.

  Returns:
    [..., M] in [0, 1] and [..., 1], float32.
  """
  highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  if masked:
    # A row without keys: any finite maximum keeps exp(-inf) = 0 and 0 / 1 = 0.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  weights = jnp.exp(logits - highest)
  total = weights.sum(-1, keepdims=True)
  return weights, jnp.where(total > 0, total, 1.0) if masked else total


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
  "auto": _dense,
  "dense": _dense,
}
