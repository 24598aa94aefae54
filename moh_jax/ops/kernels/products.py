"""Matrix products inside kernels, summed in float32 whatever the inputs."""

import jax
import jax.numpy as jnp
from jax import lax


def across(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies rows [X, D] with rows [Y, D] to [X, Y] float32."""
  return _product(a, b, (((1,), (1,)), ((), ())))


def times(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies [X, Y] with [Y, D] to [X, D] float32."""
  return _product(a, b, (((1,), (0,)), ((), ())))


def _product(a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
  return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
