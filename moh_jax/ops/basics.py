"""Small functions that many files need: checks, products, softmax, GELU."""

import math
from typing import Any

import jax
import jax.numpy as jnp

HALF = ("bfloat16", "float16")
# Name of the results that the gradients of attention need. The remat policy
# "dots" keeps them: to recompute them is to run the whole attention again.
ATTENTION = "attention"


def check_array(
  name: str, array: Any, kind: Any, shape: tuple[int, ...], what: str = ""
) -> None:
  """Refuses an array of another dtype or shape; None passes.

  Args:
    name: of the argument.
    array: of JAX or NumPy, or None.
    kind: what its dtype is, such as `bool` or `jnp.floating`.
    shape: what its shape is.
    what: ends the message.

  Raises:
    ValueError: dtype or shape is another; the message names both.
  """
  if array is None or (
    array.shape == shape and jnp.issubdtype(array.dtype, kind)
  ):
    return
  raise ValueError(
    f"{name} {array.dtype}{array.shape} must be {kind.__name__}{shape}{what}"
  )


def as_mask(array: jax.Array | None) -> jax.Array | None:
  """Integers 0 and 1, as tokenizers give them, as bool; others as they are."""
  if array is None or not jnp.issubdtype(array.dtype, jnp.integer):
    return array
  return array != 0


def einsum_float32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`jnp.einsum` whose result is float32 whatever the inputs' dtypes."""
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


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


def gelu(x: jax.Array) -> jax.Array:
  """Exact GELU, x * Phi(x), through erf.

  `jax.nn.gelu(approximate=False)` uses erfc instead, which is precise even in
  the far negative tail, where |gelu| < 1e-6, but several times slower on a CPU.
  The absolute error of this form is one float32 rounding.
  """
  return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))
