"""Softmax in two halves, so that the division can wait."""

import jax
import jax.numpy as jnp


def unnormalized_softmax(
  logits: jax.Array, *, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Numerator and denominator of a softmax over the last axis.

  A row of -inf has a denominator of 1 and so gives 0, not NaN.

  Args:
    logits: [..., M] float32, -inf where masked.
    masked: whether any logit may be -inf.

  Returns:
    [..., M] in [0, 1], its sum [..., 1], and what was subtracted from the
    logits [..., 1], all float32.
  """
  highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  if masked:
    # A row without keys: any finite maximum keeps exp(-inf) = 0 and 0 / 1 = 0.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  weights = jnp.exp(logits - highest)
  total = weights.sum(-1, keepdims=True)
  if masked:
    total = jnp.where(total > 0, total, 1.0)
  return weights, total, highest
