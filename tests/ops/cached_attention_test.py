"""Attention to a cache, in both forms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attention
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.ops.head_blocks import ActiveHeads
from tests.ops.caches import DTYPES, B, M, filled, stored, vectors, write

_attend = jax.jit(cached_attention, static_argnames="implementation")
_dense = jax.jit(attention, static_argnames="causal")


def _visible(new, seen):
  """The last of `new` tokens sees the first `seen` slots, the others fewer."""
  limits = seen - new + 1 + np.arange(new)
  visible = np.arange(M) < limits[:, None]
  return jnp.asarray(np.broadcast_to(visible, (B, new, M)))


class CachedAttentionTest(parameterized.TestCase):
  @parameterized.product(heads=(2, 6), new=(1, 3), seen=(3, 8))
  def test_equals_dense_attention_to_what_is_visible(self, heads, new, seen):
    cache, k, v = filled()
    q = vectors(new, heads)
    out = _attend(q, cache, _visible(new, seen))
    expected = _dense(q, k[:, :seen], v[:, :seen], causal=True)
    chex.assert_shape(out, q.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.parameters("bfloat16", "int8")
  def test_equals_dense_attention_to_what_is_stored(self, dtype):
    cache, *_ = filled(dtype)
    q = vectors(2, 4)
    k, v = (jnp.asarray(stored(cache, name)) for name in "kv")
    out = _attend(q, cache, _visible(2, M))
    np.testing.assert_allclose(out, _dense(q, k, v, causal=True), atol=3e-6)

  def test_int8_is_close_to_float32(self):
    q, visible = vectors(1, 4), _visible(1, M)
    rough, exact = (
      _attend(q, filled(dtype)[0], visible) for dtype in ("int8", "float32")
    )
    gap = float(jnp.abs(rough - exact).max())
    self.assertBetween(gap, 1e-5, 0.03)

  @parameterized.parameters(*DTYPES)
  def test_rows_that_see_nothing_give_zero(self, dtype):
    cache, *_ = filled(dtype)
    visible = _visible(2, M).at[1].set(False)
    out = _attend(vectors(2, 4), cache, visible)
    np.testing.assert_array_equal(out[1], 0.0)
    self.assertGreater(float(jnp.abs(out[0]).min()), 0.0)

  def test_rows_see_their_own_slots(self):
    cache, k, v = filled()
    q = vectors(1, 4)
    visible = np.array([[[1] * 5 + [0] * 3], [[0, 0] + [1] * 6]], bool)
    out = _attend(q, cache, jnp.asarray(visible))
    for row in range(B):
      inside = visible[row, 0]
      alone = (q[row : row + 1], k[row : row + 1, inside])
      expected = _dense(*alone, v[row : row + 1, inside])
      np.testing.assert_allclose(out[row], expected[0], atol=2e-6)

  @parameterized.parameters(*DTYPES)
  def test_invisible_slots_do_not_matter(self, dtype):
    cache, *_ = filled(dtype)
    other = write(
      cache, 1e4 * vectors(3, seed=8), 1e4 * vectors(3, seed=9), jnp.int32(5)
    )
    q, visible = vectors(2, 4), _visible(2, 5)
    chex.assert_trees_all_equal(
      _attend(q, cache, visible), _attend(q, other, visible)
    )

  @parameterized.product(
    dtype=("bfloat16", "int8"), q_dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_output_has_the_dtype_of_the_queries(self, dtype, q_dtype):
    cache, k, v = filled(dtype)
    q = vectors(1, 4, dtype=q_dtype)
    out = _attend(q, cache, _visible(1, M))
    chex.assert_type(out, q_dtype)
    expected = _dense(q.astype(jnp.float32), k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.05)


class KernelTest(parameterized.TestCase):
  @parameterized.product(heads=(2, 6), dtype=("float32", "bfloat16"))
  def test_equals_the_dense_form_for_active_heads(self, heads, dtype):
    cache, *_ = filled(dtype)
    q, visible = vectors(1, heads), _visible(1, 5)
    mask = np.arange(heads) % 2 == np.arange(B)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), heads // 2)
    out = _attend(q, cache, visible, active=active, implementation="kernel")
    expected = _attend(q, cache, visible, active=active)
    expected = jnp.where(mask[..., None], expected, 0)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.parameters(("int8", 1), ("float32", 2))
  def test_what_it_cannot_do_is_dense(self, dtype, new):
    cache, *_ = filled(dtype)
    q, visible = vectors(new, 4), _visible(new, 5)
    active = ActiveHeads(jnp.zeros((B, new, 4), bool), 4)
    out = _attend(q, cache, visible, active=active, implementation="kernel")
    chex.assert_trees_all_equal(out, _attend(q, cache, visible))

  def test_unknown_implementation_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "'flush' must be one of .*packed"):
      cached_attention(
        vectors(1), filled()[0], _visible(1, 5), implementation="flush"
      )


if __name__ == "__main__":
  absltest.main()
