"""Rows of an embedding's table."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.cross_entropy import ALL, take


class TakeTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_rows_and_gradients_in_each_dtype(self, dtype):
    table = jax.random.normal(jax.random.key(0), (7, 4)).astype(dtype)
    tokens = jnp.array([[0, 6, 3], [3, 3, 1]])
    weights = jax.random.normal(jax.random.key(1), (2, 3, 4))

    def weighted(table):
      rows = take(ALL, table, tokens, jnp.float32)
      return (weights * rows).sum(), rows

    (_, rows), grad = jax.jit(jax.value_and_grad(weighted, has_aux=True))(table)
    np.testing.assert_array_equal(rows, np.asarray(table, np.float32)[tokens])
    one_hot = jax.nn.one_hot(tokens, 7)
    expected = jnp.einsum("bnv,bnc->vc", one_hot, weights)
    self.assertEqual(grad.dtype, table.dtype)
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(
      grad.astype(jnp.float32), expected, atol=tolerance, rtol=tolerance
    )


if __name__ == "__main__":
  absltest.main()
