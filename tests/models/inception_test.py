"""Shapes and refusals; tests/parity has the recorded numbers."""

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.models.inception import POOL_DIM, SPATIAL_DIM, InceptionV3


def _shapes(shape, **options):
  model = InceptionV3(**options)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.eval_shape(model.init_with_output, jax.random.key(0), x)


class InceptionTest(parameterized.TestCase):
  def test_features_have_their_shapes(self):
    features, variables = _shapes((2, 299, 299, 3))
    self.assertEqual(features.pool3.shape, (2, POOL_DIM))
    self.assertEqual(features.spatial.shape, (2, 17, 17, 7))
    self.assertEqual(features.spatial.size, 2 * SPATIAL_DIM)
    self.assertEqual(features.logits.shape, (2, 1008))
    leaves = jax.tree.leaves(variables["params"])
    self.assertEqual(sum(leaf.size for leaf in leaves), 23_885_392)

  def test_options_change_the_shapes(self):
    features, _ = _shapes((1, 75, 91, 3), num_classes=5, spatial_channels=3)
    self.assertEqual(features.logits.shape, (1, 5))
    self.assertEqual(features.spatial.shape, (1, 3, 4, 3))

  @parameterized.parameters((299, 299, 3), (1, 299, 299, 1), (1, 299, 74, 3))
  def test_other_inputs_are_refused(self, *shape):
    with self.assertRaisesRegex(ValueError, r"must be \[batch, X, Y, 3\]"):
      _shapes(shape)


if __name__ == "__main__":
  absltest.main()
