"""Attention to a cache, in both forms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attention, cached_attention
from moh_jax.ops.cache import Slots
from moh_jax.ops.head_blocks import ActiveHeads
from tests.ops.caches import DTYPES, B, M, filled, stored, vectors, write

_attend = jax.jit(cached_attention, static_argnames="implementation")
_dense = jax.jit(attention, static_argnames="causal")


def _slots(new, seen, first=(0, 0)):
  """The last of `new` tokens sees the slots up to `seen`, the others fewer."""
  return Slots(jnp.asarray(seen) - new, jnp.asarray(first, jnp.int32))


class CachedAttentionTest(parameterized.TestCase):
  @parameterized.parameters((2, 1, 8), (6, 3, 3), (6, 1, 3))
  def test_equals_dense_attention_to_what_is_slots(self, heads, new, seen):
    cache, k, v = filled()
    q = vectors(new, heads)
    out = _attend(q, cache, _slots(new, seen))
    expected = _dense(q, k[:, :seen], v[:, :seen], causal=True)
    chex.assert_shape(out, q.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.product(
    dtype=("bfloat16", "int8"), q_dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_equals_dense_attention_to_what_is_stored(self, dtype, q_dtype):
    cache, *_ = filled(dtype)
    q = vectors(2, 4, dtype=q_dtype)
    k, v = (jnp.asarray(stored(cache, name)) for name in "kv")
    out = _attend(q, cache, _slots(2, M))
    chex.assert_type(out, q_dtype)
    expected = _dense(q.astype(jnp.float32), k, v, causal=True)
    atol = 3e-6 if q_dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=atol)

  @parameterized.parameters(*DTYPES)
  def test_rows_that_see_nothing_give_zero(self, dtype):
    cache, *_ = filled(dtype)
    out = _attend(vectors(2, 4), cache, _slots(2, M, first=(0, M)))
    np.testing.assert_array_equal(out[1], 0.0)
    self.assertGreater(float(jnp.abs(out[0]).min()), 0.0)

  def test_rows_see_their_own_slots(self):
    cache, k, v = filled()
    q = vectors(1, 4)
    seen = (0, 5), (2, M)
    first, end = zip(*seen)
    out = _attend(q, cache, _slots(1, end, first))
    for row, inside in enumerate(seen):
      inside = slice(*inside)
      alone = (q[row : row + 1], k[row : row + 1, inside])
      expected = _dense(*alone, v[row : row + 1, inside])
      np.testing.assert_allclose(out[row], expected[0], atol=2e-6)

  @parameterized.parameters(*DTYPES)
  def test_invisible_slots_do_not_matter(self, dtype):
    cache, *_ = filled(dtype)
    other = write(
      cache, 1e4 * vectors(3, seed=8), 1e4 * vectors(3, seed=9), jnp.int32(5)
    )
    q, slots = vectors(2, 4), _slots(2, 5)
    chex.assert_trees_all_equal(
      _attend(q, cache, slots), _attend(q, other, slots)
    )


class KernelTest(parameterized.TestCase):
  @parameterized.product(heads=(2, 6), dtype=DTYPES)
  def test_equals_the_dense_form_for_active_heads(self, heads, dtype):
    cache, *_ = filled(dtype)
    q, slots = vectors(1, heads), _slots(1, 5)
    mask = np.arange(heads) % 2 == np.arange(B)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), heads // 2)
    out = _attend(q, cache, slots, active=active, implementation="kernel")
    expected = _attend(q, cache, slots, active=active)
    expected = jnp.where(mask[..., None], expected, 0)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  def test_more_heads_than_the_bound_give_nan_in_their_text(self):
    cache, *_ = filled()
    q, slots = vectors(1, 4), _slots(1, 5)
    mask = np.arange(4) <= 3 * (np.arange(B) == 0)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), 1)
    out = _attend(q, cache, slots, active=active, implementation="kernel")
    self.assertTrue(np.isnan(out[0]).any())
    expected = jnp.where(mask[..., None], _attend(q, cache, slots), 0)
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)

  def test_texts_have_lengths_of_their_own(self):
    cache, *_ = filled("int8")
    q, slots = vectors(1, 4), _slots(1, (3, 7), (1, 0))
    out = _attend(q, cache, slots, implementation="kernel")
    expected = _attend(q, cache, slots)
    np.testing.assert_allclose(out, expected, atol=2e-6)


if __name__ == "__main__":
  absltest.main()
