import math

import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.speed import exactness
from moh_jax.speed.exactness import Errors


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


class ErrorsTest(parameterized.TestCase):
  def test_compares_outputs_and_gradients(self):
    found = jnp.array([2.0]), (jnp.array([1.0]), jnp.array([3.0]))
    expected = jnp.array([1.0]), (jnp.array([1.0]), jnp.array([2.0]))
    self.assertEqual(exactness.compare(found, expected), Errors(1.0, 0.5))

  def test_no_gradients_have_no_error(self):
    found = jnp.array([2.0]), ()
    self.assertEqual(exactness.compare(found, found), Errors(0.0, None))

  @parameterized.parameters(
    (Errors(1e-6), "float32", None),
    (Errors(3e-6), "float32", "outputs 3.0e-06 is above 2e-06"),
    (Errors(1e-6, 9e-6), "float32", None),
    (Errors(1e-6, 2e-5), "float32", "gradients 2.0e-05 is above 1e-05"),
    (Errors(1e-2, 1e-2), "bfloat16", None),
    (Errors(3e-2, 0.0), "bfloat16", "outputs 3.0e-02 is above 2e-02"),
    (Errors(math.nan), "float32", "outputs nan is above 2e-06"),
    (Errors(0.0, math.nan), "bfloat16", "gradients nan is above 2e-02"),
  )
  def test_fault_names_what_is_above_its_limit(self, errors, dtype, fault):
    if fault is None:
      self.assertIsNone(errors.fault(dtype))
    else:
      self.assertEqual(errors.fault(dtype), f"relative error of the {fault}")

  def test_largest_is_of_both(self):
    self.assertEqual(Errors(0.25, 0.5).largest, 0.5)
    self.assertEqual(Errors(0.25).largest, 0.25)
    self.assertTrue(math.isnan(Errors(0.25, math.nan).largest))


if __name__ == "__main__":
  absltest.main()
