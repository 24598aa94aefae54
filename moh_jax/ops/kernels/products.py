"""Matrix products with float32 sums, whatever they multiply."""

import jax
import jax.numpy as jnp
from jax import lax


def across(a: jax.Array, b: jax.Array) -> jax.Array:
  """Rows [X, D] with rows [Y, D]: [X, Y] float32."""
  return _product(a, b, (((1,), (1,)), ((), ())))


def times(a: jax.Array, b: jax.Array) -> jax.Array:
  """[X, Y] with [Y, D]: [X, D] float32."""
  return _product(a, b, (((1,), (0,)), ((), ())))


def _product(a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
  return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
