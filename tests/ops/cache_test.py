"""Key/value caches: what is stored, and attention to it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attention
from moh_jax.ops.cache import cached_attention, make_cache, write_cache

_B, _K, _M, _D = 2, 2, 8, 6
_DTYPES = ("float32", "bfloat16", "int8")
_write = jax.jit(write_cache)
_attend = jax.jit(cached_attention, static_argnames="scale")
_dense = jax.jit(attention, static_argnames=("causal", "scale"))


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


def _visible(new, seen):
  """The last of `new` tokens sees the first `seen` slots, the others fewer."""
  limits = seen - new + 1 + np.arange(new)
  visible = np.arange(_M) < limits[:, None]
  return jnp.asarray(np.broadcast_to(visible, (_B, new, _M)))


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


class CachedAttentionTest(parameterized.TestCase):
  @parameterized.product(heads=(2, 6), new=(1, 3), seen=(3, 8))
  def test_equals_dense_attention_to_what_is_visible(self, heads, new, seen):
    cache, k, v = _filled()
    q = _vectors(new, heads)
    out = _attend(q, cache, _visible(new, seen))
    expected = _dense(q, k[:, :seen], v[:, :seen], causal=True)
    chex.assert_shape(out, q.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.parameters("bfloat16", "int8")
  def test_equals_dense_attention_to_what_is_stored(self, dtype):
    cache, *_ = _filled(dtype)
    q = _vectors(2, 4)
    k, v = (jnp.asarray(_stored(cache, name)) for name in "kv")
    out = _attend(q, cache, _visible(2, _M))
    np.testing.assert_allclose(out, _dense(q, k, v, causal=True), atol=3e-6)

  def test_int8_is_close_to_float32(self):
    q, visible = _vectors(1, 4), _visible(1, _M)
    rough, exact = (
      _attend(q, _filled(dtype)[0], visible) for dtype in ("int8", "float32")
    )
    gap = float(jnp.abs(rough - exact).max())
    self.assertBetween(gap, 1e-5, 0.03)

  @parameterized.parameters(*_DTYPES)
  def test_rows_that_see_nothing_give_zero(self, dtype):
    cache, *_ = _filled(dtype)
    visible = _visible(2, _M).at[1].set(False)
    out = _attend(_vectors(2, 4), cache, visible)
    np.testing.assert_array_equal(out[1], 0.0)
    self.assertGreater(float(jnp.abs(out[0]).min()), 0.0)

  def test_rows_see_their_own_slots(self):
    cache, k, v = _filled()
    q = _vectors(1, 4)
    visible = np.array([[[1] * 5 + [0] * 3], [[0, 0] + [1] * 6]], bool)
    out = _attend(q, cache, jnp.asarray(visible))
    for row in range(_B):
      inside = visible[row, 0]
      alone = (q[row : row + 1], k[row : row + 1, inside])
      expected = _dense(*alone, v[row : row + 1, inside])
      np.testing.assert_allclose(out[row], expected[0], atol=2e-6)

  @parameterized.parameters(*_DTYPES)
  def test_invisible_slots_do_not_matter(self, dtype):
    cache, *_ = _filled(dtype)
    other = _write(
      cache, 1e4 * _vectors(3, seed=8), 1e4 * _vectors(3, seed=9), jnp.int32(5)
    )
    q, visible = _vectors(2, 4), _visible(2, 5)
    chex.assert_trees_all_equal(
      _attend(q, cache, visible), _attend(q, other, visible)
    )

  def test_scale_replaces_the_default(self):
    cache, k, v = _filled()
    q = _vectors(1, 4)
    out = _attend(q, cache, _visible(1, _M), scale=2.0)
    np.testing.assert_allclose(out, _dense(q, k, v, scale=2.0), atol=3e-6)

  @parameterized.product(
    dtype=("bfloat16", "int8"), q_dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_output_has_the_dtype_of_the_queries(self, dtype, q_dtype):
    cache, k, v = _filled(dtype)
    q = _vectors(1, 4, dtype=q_dtype)
    out = _attend(q, cache, _visible(1, _M))
    chex.assert_type(out, q_dtype)
    expected = _dense(q.astype(jnp.float32), k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.05)


if __name__ == "__main__":
  absltest.main()
