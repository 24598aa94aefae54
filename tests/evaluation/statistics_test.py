import functools

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import statistics


def _features(count, dim=6, offset=0.0):
  rng = np.random.default_rng(0)
  mix = rng.normal(size=(dim, dim))
  return np.float32(rng.normal(size=(count, dim)) @ mix + offset)


def _streamed(features, sizes):
  parts = np.split(features, np.cumsum(sizes)[:-1])
  return functools.reduce(statistics.merge, map(statistics.moments, parts))


class MomentsTest(parameterized.TestCase):
  @parameterized.parameters((0.0,), (1e4,))
  def test_uneven_batches_equal_one_pass(self, offset):
    features = _features(50, offset=offset)
    streamed = _streamed(features, (1, 17, 3, 28, 1)).gaussian()
    exact = features.astype(np.float64)
    self.assertEqual(streamed.mean.dtype, np.float64)
    np.testing.assert_allclose(streamed.mean, exact.mean(0), rtol=1e-13)
    # Sums of squares would lose 8 digits to the offset.
    np.testing.assert_allclose(
      streamed.covariance, np.cov(exact.T), rtol=1e-9, atol=1e-11
    )

  def test_merging_does_not_depend_on_the_order(self):
    a, b = (statistics.moments(_features(n)) for n in (20, 5))
    one, other = statistics.merge(a, b), statistics.merge(b, a)
    self.assertEqual(one.count, other.count)
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-14)
    np.testing.assert_allclose(one.scatter, other.scatter, rtol=1e-13)

  def test_covariance_is_symmetric(self):
    covariance = _streamed(_features(40), (13, 27)).gaussian().covariance
    np.testing.assert_array_equal(covariance, covariance.T)

  def test_copies_have_no_covariance(self):
    g = statistics.moments(np.repeat(_features(1), 9, axis=0)).gaussian()
    np.testing.assert_array_equal(g.covariance, np.zeros((6, 6)))

  def test_one_sample_is_refused(self):
    with self.assertRaisesRegex(ValueError, "at least 2 samples, there are 1"):
      statistics.moments(_features(1)).gaussian()

  @parameterized.parameters((np.zeros((0, 3)),), (np.zeros(3),))
  def test_other_shapes_are_refused(self, features):
    with self.assertRaisesRegex(ValueError, r"must be \[samples, dim\]"):
      statistics.moments(features)

  @parameterized.parameters(np.nan, np.inf)
  def test_broken_features_are_refused(self, value):
    features = _features(5)
    features[2, 1] = value
    with np.errstate(invalid="ignore"):
      moments = statistics.moments(features)
    with self.assertRaisesRegex(ValueError, "must be finite"):
      moments.gaussian()


if __name__ == "__main__":
  absltest.main()
