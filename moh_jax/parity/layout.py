"""Between the recorded layout of images and ours."""

import jax
import jax.numpy as jnp
import numpy as np


def channels_last(x: np.ndarray) -> jax.Array:
  """[..., c, X, Y] to [..., X, Y, c]."""
  return jnp.moveaxis(jnp.asarray(x), -3, -1)


def channels_first(x: jax.Array) -> jax.Array:
  """[..., X, Y, c] to [..., c, X, Y]."""
  return jnp.moveaxis(x, -1, -3)
