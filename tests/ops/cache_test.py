"""Key/value caches: what is stored."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.cache import make_cache, write_cache

_B, _K, _M, _D = 2, 2, 8, 6
_DTYPES = ("float32", "bfloat16", "int8")
_write = jax.jit(write_cache)


def _vectors(tokens, heads=_K, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(_B, tokens, heads, _D)), dtype)


def _filled(dtype="float32", tokens=_M, slot=0):
  """A cache with random keys and values in it, and these."""
  k, v = _vectors(tokens, seed=1), _vectors(tokens, seed=2)
  cache = make_cache(_B, _K, _M, _D, dtype)
  return _write(cache, k, v, jnp.int32(slot)), k, v


def _stored(cache, name):
  """Keys or values as floats, [B, M, K, D]."""
  x = np.asarray(getattr(cache, name), np.float32)
  scale = getattr(cache, f"{name}_scale")
  if scale is not None:
    x = x * np.asarray(scale)[..., None]
  return x.swapaxes(1, 2)


class WriteCacheTest(parameterized.TestCase):
  @parameterized.parameters(*_DTYPES)
  def test_new_cache_is_empty_and_of_its_dtype(self, dtype):
    cache = make_cache(_B, _K, _M, _D, dtype)
    chex.assert_shape([cache.k, cache.v], (_B, _K, _M, _D))
    chex.assert_type([cache.k, cache.v], jnp.dtype(dtype))
    for leaf in jax.tree.leaves(cache):
      np.testing.assert_array_equal(leaf, 0)
    self.assertLen(jax.tree.leaves(cache), 4 if dtype == "int8" else 2)

  @parameterized.product(dtype=_DTYPES, slot=(0, 3, 6))
  def test_writes_its_slots_and_no_other(self, dtype, slot):
    before, *_ = _filled(dtype)
    tokens = 2
    k, v = _vectors(tokens, seed=3), _vectors(tokens, seed=4)
    after = _write(before, k, v, jnp.int32(slot))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    inside = slice(slot, slot + tokens)
    atol = {"float32": 0, "bfloat16": 0.02, "int8": 0.02}[dtype]
    for name, new in (("k", k), ("v", v)):
      np.testing.assert_allclose(
        _stored(after, name)[:, inside], new, atol=atol
      )
      kept = np.delete(_stored(after, name), inside, axis=1)
      expected = np.delete(_stored(before, name), inside, axis=1)
      np.testing.assert_array_equal(kept, expected)

  def test_int8_is_off_by_half_a_step_of_its_vector_at_most(self):
    k = _vectors(_M, seed=5) * jnp.array([1e-3, 50.0])[:, None, None, None]
    cache = make_cache(_B, _K, _M, _D, "int8")
    cache = _write(cache, k, k, jnp.int32(0))
    largest = np.abs(np.asarray(k)).max(-1, keepdims=True)
    gap = np.abs(_stored(cache, "k") - np.asarray(k))
    bound = largest / 127 / 2
    self.assertTrue(np.all(gap <= bound * 1.0001))
    self.assertGreater((gap / bound).max(), 0.5)  # and the bound is tight
    self.assertEqual(int(jnp.abs(cache.k).max()), 127)

  def test_int8_of_nothing_is_nothing(self):
    zeros = jnp.zeros((_B, 2, _K, _D))
    cache = make_cache(_B, _K, _M, _D, "int8")
    cache = _write(cache, zeros, zeros, jnp.int32(1))
    for leaf in jax.tree.leaves(cache):
      np.testing.assert_array_equal(leaf, 0)

  def test_bfloat16_vectors_go_into_a_float32_cache(self):
    k = _vectors(2, dtype=jnp.bfloat16)
    cache = make_cache(_B, _K, _M, _D, "float32")
    cache = _write(cache, k, k, jnp.int32(0))
    np.testing.assert_array_equal(
      _stored(cache, "v")[:, :2], np.asarray(k, np.float32)
    )


if __name__ == "__main__":
  absltest.main()
