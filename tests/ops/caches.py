"""A small key/value cache with known contents, for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.cache import LayerCache, make_cache, write_cache

B, K, M, D = 2, 2, 8, 6
DTYPES = ("float32", "bfloat16", "int8")
write = jax.jit(write_cache)


def vectors(
  tokens: int, heads: int = K, seed: int = 0, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
  """Random [B, tokens, heads, D]."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(B, tokens, heads, D)), dtype)


def filled(
  dtype: str = "float32", tokens: int = M, slot: int = 0
) -> tuple[LayerCache, jax.Array, jax.Array]:
  """A cache with random keys and values in it, and these."""
  k, v = vectors(tokens, seed=1), vectors(tokens, seed=2)
  return write(make_cache(B, K, M, D, dtype), k, v, jnp.int32(slot)), k, v


def stored(cache: LayerCache, name: str) -> np.ndarray:
  """Keys or values as floats, [B, M, K, D]."""
  x = np.asarray(getattr(cache, name), np.float32)
  scale = getattr(cache, f"{name}_scale")
  if scale is not None:
    x = x * np.asarray(scale.mT)
  return x.swapaxes(1, 2)
