"""Matrix products with float32 sums."""

import jax
import jax.numpy as jnp


def einsum_float32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`jnp.einsum` whose result is float32 whatever the inputs' dtypes."""
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
