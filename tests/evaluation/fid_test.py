"""Closed forms and refusals; tests/parity has recorded values."""

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import fid
from moh_jax.evaluation.statistics import Gaussian, moments


def _diagonal(mean, variances):
  return Gaussian(np.array(mean, np.float64), np.diag(variances).astype(float))


def _sampled(count, dim, seed):
  rng = np.random.default_rng(seed)
  return moments(rng.normal(size=(count, dim)) * rng.uniform(size=dim))


class FrechetTest(parameterized.TestCase):
  def test_diagonal_covariances(self):
    a, b = _diagonal([1, 2], [4, 9]), _diagonal([0, 0], [1, 25])
    # |m|^2 + (2 - 1)^2 + (3 - 5)^2
    self.assertAlmostEqual(fid.frechet_distance(a, b), 10.0, places=13)
    terms = fid.frechet_terms(a, b)
    np.testing.assert_allclose(terms, (5, 13, 26, 2 + 15), rtol=1e-14)

  def test_rotation_changes_nothing(self):
    a, b = (_sampled(50, 7, seed).gaussian() for seed in (1, 2))
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(7, 7)))
    turned = [Gaussian(q @ g.mean, q @ g.covariance @ q.T) for g in (a, b)]
    self.assertAlmostEqual(
      fid.frechet_distance(*turned), fid.frechet_distance(a, b), places=12
    )

  def test_is_symmetric(self):
    a, b = (_sampled(30, 5, seed).gaussian() for seed in (1, 2))
    self.assertAlmostEqual(
      fid.frechet_distance(a, b), fid.frechet_distance(b, a), places=13
    )

  @parameterized.parameters(3, 40)
  def test_distance_to_itself_is_zero(self, count):
    g = _sampled(count, 20, 0).gaussian()
    self.assertAlmostEqual(fid.frechet_distance(g, g), 0.0, places=12)

  def test_singular_covariances_are_exact(self):
    # Variance along two lines: the root's trace is sd * sd * |cosine|.
    x, y = np.zeros((6, 6)), np.zeros((6, 6))
    u, v = np.eye(6)[0], np.ones(6) / np.sqrt(6)
    x, y = 9 * np.outer(u, u), 4 * np.outer(v, v)
    zero = np.zeros(6)
    got = fid.frechet_distance(Gaussian(zero, x), Gaussian(zero, y))
    self.assertAlmostEqual(got, 13 - 2 * 6 / np.sqrt(6), places=12)

  def test_points_have_the_distance_of_their_means(self):
    a, b = _diagonal([3, 0], [0, 0]), _diagonal([0, 4], [0, 0])
    self.assertEqual(fid.frechet_distance(a, b), 25.0)

  def test_other_dimensions_are_refused(self):
    with self.assertRaisesRegex(ValueError, "second .* both must have 2"):
      fid.frechet_distance(_diagonal([0] * 2, [1] * 2), _diagonal([0], [1]))

  def test_broken_statistics_are_refused(self):
    with self.assertRaisesRegex(ValueError, "first distribution holds NaN"):
      fid.frechet_distance(_diagonal([np.nan], [1]), _diagonal([0], [1]))


class InceptionScoreTest(parameterized.TestCase):
  def test_equal_samples_score_one(self):
    logits = np.repeat(np.random.default_rng(0).normal(size=(1, 9)), 5, axis=0)
    self.assertAlmostEqual(fid.block_score(logits), 1.0, places=13)

  @parameterized.parameters(1e3, 1e30)
  def test_certain_and_diverse_samples_score_the_number_of_classes(self, large):
    logits = np.float32(large) * np.eye(6, dtype=np.float32)
    self.assertAlmostEqual(fid.block_score(logits), 6.0, places=12)

  def test_mean_of_blocks_counts_the_short_one_like_others(self):
    logits = np.random.default_rng(0).normal(size=(25, 4)).astype(np.float32)
    blocks = [logits[:10], logits[10:20], logits[20:]]
    self.assertAlmostEqual(
      fid.inception_score(logits, 10),
      np.mean([fid.block_score(block) for block in blocks]),
      places=14,
    )

  @parameterized.parameters((np.zeros((0, 3)),), (np.full((2, 3), np.nan),))
  def test_nothing_and_nan_are_refused(self, logits):
    with self.assertRaisesRegex(ValueError, "at least 1 sample and finite"):
      fid.inception_score(logits)


if __name__ == "__main__":
  absltest.main()
