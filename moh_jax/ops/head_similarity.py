"""How alike the heads of a layer are: cosines of their patterns and outputs.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, C width.
"""

import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import Visible

# Collection in which layers record cosines where a caller asks for it. They
# then compute every head for every token, whatever the router chose.
SIMILARITY = "similarity"
_EXACT = jax.lax.Precision.HIGHEST


def pattern_cosines(
  q: jax.Array,
  k: jax.Array,
  *,
  visible: Visible,
  scale: float,
  bias: jax.Array | None = None,
) -> jax.Array:
  """Cosines of the attention weights of every two heads, at every query.

  Args:
    q: [B, N, H, D].
    k: [B, M, K, D].
    visible: which keys a query sees.
    scale: factor of the logits.
    bias: [H, N, M] added to the scaled logits, or None.

  Returns:
    [B, N, H, H] float32; 0 for a query that sees no key.
  """
  q, k = (x.astype(jnp.float32) for x in (q, k))
  k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
  logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, precision=_EXACT) * scale
  if bias is not None:
    logits = logits + bias[None]
  mask = visible.mask(q.shape[1], k.shape[1])
  if mask is not None:
    logits = jnp.where(mask, logits, -jnp.inf)
  highest = logits.max(-1, keepdims=True)
  weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
  return cosines(weights.swapaxes(1, 2))


def feature_cosines(heads: jax.Array, kernel: jax.Array) -> jax.Array:
  """Cosines of what every two heads add to each token.

  Outputs of two heads have no coordinates in common before the output
  projection, so they are compared behind it.

  Args:
    heads: [B, N, H, D] outputs of the heads, without gates.
    kernel: [H, D, C] of the output projection.

  Returns:
    [B, N, H, H] float32.
  """
  heads, kernel = (x.astype(jnp.float32) for x in (heads, kernel))
  added = jnp.einsum("bnhd,hdc->bnhc", heads, kernel, precision=_EXACT)
  return cosines(added)


def cosines(vectors: jax.Array) -> jax.Array:
  """Cosines [B, N, H, H] of vectors [B, N, H, X]; those of a zero are 0."""
  norms = jnp.sqrt(jnp.square(vectors).sum(-1, keepdims=True))
  unit = vectors / jnp.where(norms > 0, norms, 1.0)
  return jnp.einsum("bnhx,bnix->bnhi", unit, unit, precision=_EXACT)
