"""Key/value caches: what is stored."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.cache import Slots, make_cache
from tests.ops.caches import DTYPES, B, D, K, M, filled, stored, vectors, write


class SlotsTest(parameterized.TestCase):
  @parameterized.parameters(([3, 3],), (3,))
  def test_tokens_see_their_text_up_to_themselves(self, start):
    slots = Slots(jnp.asarray(start), jnp.asarray([0, 4]))
    expected = [
      [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]],
      [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]],
    ]
    np.testing.assert_array_equal(slots.visible(2, 6), expected)


class WriteCacheTest(parameterized.TestCase):
  @parameterized.product(dtype=DTYPES, slot=(0, 6))
  def test_writes_its_slots_and_no_other(self, dtype, slot):
    before, *_ = filled(dtype)
    tokens = 2
    k, v = vectors(tokens, seed=3), vectors(tokens, seed=4)
    after = write(before, k, v, jnp.int32(slot))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    inside = slice(slot, slot + tokens)
    atol = {"float32": 0, "bfloat16": 0.02, "int8": 0.02}[dtype]
    for name, new in (("k", k), ("v", v)):
      np.testing.assert_allclose(stored(after, name)[:, inside], new, atol=atol)
      kept = np.delete(stored(after, name), inside, axis=1)
      expected = np.delete(stored(before, name), inside, axis=1)
      np.testing.assert_array_equal(kept, expected)

  @parameterized.parameters(*DTYPES)
  def test_texts_write_slots_of_their_own(self, dtype):
    before, *_ = filled(dtype)
    k, v = vectors(2, seed=3), vectors(2, seed=4)
    after = write(before, k, v, jnp.asarray([1, 5]))
    for text, slot in enumerate((1, 5)):
      alone = write(before, k, v, jnp.int32(slot))
      chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: x[text], tree) for tree in (after, alone))  # noqa: B023
      )

  def test_int8_is_off_by_half_a_step_of_its_vector_at_most(self):
    k = vectors(M, seed=5) * jnp.array([1e-3, 50.0])[:, None, None, None]
    cache = make_cache(B, K, M, D, "int8")
    cache = write(cache, k, k, jnp.int32(0))
    largest = np.abs(np.asarray(k)).max(-1, keepdims=True)
    gap = np.abs(stored(cache, "k") - np.asarray(k))
    bound = largest / 127 / 2
    self.assertTrue(np.all(gap <= bound * 1.0001))
    self.assertGreater((gap / bound).max(), 0.5)  # and the bound is tight
    self.assertEqual(int(jnp.abs(cache.k).max()), 127)

  def test_bfloat16_vectors_go_into_a_float32_cache(self):
    k = vectors(2, dtype=jnp.bfloat16)
    cache = make_cache(B, K, M, D, "float32")
    cache = write(cache, k, k, jnp.int32(0))
    np.testing.assert_array_equal(
      stored(cache, "v")[:, :2], np.asarray(k, np.float32)
    )


if __name__ == "__main__":
  absltest.main()
