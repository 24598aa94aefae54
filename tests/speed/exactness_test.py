import math

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.speed import exactness


class RelativeErrorTest(absltest.TestCase):
  def test_is_the_worst_of_a_tree_by_each_array_s_largest_value(self):
    expected = {"a": jnp.array([1.0, -200.0]), "b": jnp.array([4.0])}
    found = {"a": jnp.array([3.0, -200.0]), "b": jnp.array([3.0])}
    self.assertAlmostEqual(exactness.relative_error(found, expected), 0.25)

  def test_is_absolute_where_zeros_are_expected(self):
    error = exactness.relative_error(jnp.full(3, 0.5), jnp.zeros(3))
    self.assertEqual(error, 0.5)

  def test_dtypes_may_differ(self):
    found = jnp.ones(2, jnp.bfloat16)
    self.assertEqual(exactness.relative_error(found, jnp.ones(2)), 0.0)

  def test_nan_is_kept(self):
    found = [jnp.array([jnp.nan]), jnp.ones(1)]
    error = exactness.relative_error(found, [jnp.ones(1), jnp.ones(1)])
    self.assertTrue(math.isnan(error))


class CompareTest(parameterized.TestCase):
  def _compare(self, outputs, gradients=None, dtype="float32"):
    """Compares a program whose relative errors are so large."""
    parts = [[outputs], [] if gradients is None else [gradients]]
    expected = [[jnp.ones(1) for _ in part] for part in parts]
    found = [[1 + jnp.full(1, error) for error in part] for part in parts]
    return exactness.compare(found, expected, dtype)

  def test_compares_outputs_and_gradients(self):
    found = jnp.array([2.0]), (jnp.array([1.0]), jnp.array([3.0]))
    expected = jnp.array([1.0]), (jnp.array([1.0]), jnp.array([2.0]))
    error, fault = exactness.compare(found, expected, "float32")
    self.assertEqual(error, 1.0)
    self.assertIn("outputs 1.0e+00", fault)
    error, fault = exactness.compare(
      (expected[0], found[1]), expected, "float32"
    )
    self.assertEqual(error, 0.5)
    self.assertIn("gradients 5.0e-01", fault)

  def test_no_gradients_have_no_error(self):
    found = jnp.array([2.0]), ()
    self.assertEqual(exactness.compare(found, found, "float32"), (0.0, None))

  @parameterized.parameters(
    (1e-6, None, "float32", None),
    (3e-6, None, "float32", "outputs 3.*e-06 is above 2e-06"),
    (1e-6, 9e-6, "float32", None),
    (1e-6, 2e-5, "float32", "gradients 2.0e-05 is above 1e-05"),
    (1e-2, 1e-2, "bfloat16", None),
    (3e-2, 0.0, "bfloat16", "outputs 3.0e-02 is above 2e-02"),
    (math.nan, None, "float32", "outputs nan is above 2e-06"),
    (0.0, math.nan, "bfloat16", "gradients nan is above 2e-02"),
  )
  def test_fault_names_what_is_above_its_limit(
    self, outputs, gradients, dtype, expected
  ):
    _, fault = self._compare(outputs, gradients, dtype)
    if expected is None:
      self.assertIsNone(fault)
    else:
      self.assertRegex(fault, f"^relative error of the {expected}$")

  @parameterized.parameters(
    (0.25, 0.5, 0.5), (0.25, None, 0.25), (0.25, math.nan, math.nan)
  )
  def test_error_is_the_larger_of_both(self, outputs, gradients, expected):
    error, _ = self._compare(outputs, gradients)
    np.testing.assert_equal(error, expected)


if __name__ == "__main__":
  absltest.main()
