"""Softmax without its division, which callers apply later."""

import jax
import jax.numpy as jnp


def unnormalized_softmax(
  logits: jax.Array, *, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Numerator and denominator of a softmax over the last axis.

  A row that is all -inf gets the denominator 1, so its weights are 0, not NaN.

  Args:
    logits: [..., M] float32, -inf where masked.
    masked: whether any logit may be -inf.

  Returns:
    The weights [..., M] in [0, 1], their sum [..., 1], and the largest logit
    [..., 1] that was subtracted before the exponential; all float32.
  """
  highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  if masked:
    # Rows without a key: any finite maximum gives exp(-inf) = 0 and 0 / 1 = 0.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  weights = jnp.exp(logits - highest)
  total = weights.sum(-1, keepdims=True)
  if masked:
    total = jnp.where(total > 0, total, 1.0)
  return weights, total, highest
