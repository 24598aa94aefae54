"""The softmax whose division waits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.basics import unnormalized_softmax


class SoftmaxTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_equals_jax_where_nothing_is_masked(self, masked):
    logits = 5 * jax.random.normal(jax.random.key(0), (3, 4, 7))
    weights, total, highest = unnormalized_softmax(logits, masked=masked)
    chex.assert_shape((weights, total), [(3, 4, 7), (3, 4, 1)])
    np.testing.assert_array_equal(highest, logits.max(-1, keepdims=True))
    expected = jax.nn.softmax(logits)
    np.testing.assert_allclose(weights / total, expected, rtol=1e-5)

  def test_masked_row_gives_zero_and_the_rest_sums_to_one(self):
    logits = jnp.array([[-jnp.inf] * 3, [-jnp.inf, 2.0, 900.0]])
    weights, total, _ = unnormalized_softmax(logits, masked=True)
    np.testing.assert_array_equal(weights / total, [[0, 0, 0], [0, 0, 1]])


if __name__ == "__main__":
  absltest.main()
