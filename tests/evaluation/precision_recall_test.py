from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import precision_recall as pr


def _distances(x, y):
  return ((x[:, None].astype(np.float64) - y[None]) ** 2).sum(-1)


def _by_hand(generated, reference, k):
  """The definition, from whole distance matrices."""
  radii = [
    np.sort(_distances(x, x), axis=-1)[:, k] for x in (reference, generated)
  ]
  cross = _distances(generated, reference)
  precision = (cross <= radii[0]).any(1).mean()
  return precision, (cross <= radii[1][:, None]).any(0).mean()


class PrecisionRecallTest(parameterized.TestCase):
  def _small_blocks(self):
    sizes = {"_ROWS": 7, "_COLUMNS": 5, "_PAIRS": 3}
    self.enter_context(mock.patch.multiple(pr, **sizes))

  @parameterized.parameters(1, 3, 5)
  def test_blocks_follow_the_definition(self, k):
    rng = np.random.default_rng(k)
    reference = rng.normal(size=(40, 8)).astype(np.float32)
    generated = rng.normal(size=(33, 8)).astype(np.float32) + 0.8
    self._small_blocks()
    got = pr.precision_recall(generated, reference, k)
    self.assertEqual(got, _by_hand(generated, reference, k))
    self.assertBetween(min(got), 0.1, 0.9)

  def test_ties_and_copies_follow_the_definition(self):
    rng = np.random.default_rng(0)
    reference = rng.integers(0, 3, (60, 3)).astype(np.float32)
    generated = rng.integers(0, 4, (50, 3)).astype(np.float32)
    self._small_blocks()
    got = pr.precision_recall(generated, reference)
    self.assertEqual(got, _by_hand(generated, reference, 3))

  def test_a_copy_of_the_neighbour_lies_on_the_surface(self):
    # Irrational coordinates: only equal rounding makes the distances equal.
    features = np.random.default_rng(0).normal(size=(4, 2048)) + 100
    radii = pr.knn_radii(features, 3)
    for i in range(4):
      farthest = np.argmax(_distances(features[i : i + 1], features)[0])
      point = features[farthest : farthest + 1]
      inside = pr.in_manifold(point, features[i : i + 1], radii[i : i + 1])
      self.assertTrue(inside[0])
      smaller = np.nextafter(radii[i : i + 1], 0)
      outside = pr.in_manifold(point, features[i : i + 1], smaller)
      self.assertFalse(outside[0])

  def test_a_set_covers_itself(self):
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    self.assertEqual(pr.precision_recall(x, x), (1.0, 1.0))

  def test_distant_sets_share_nothing(self):
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    self.assertEqual(pr.precision_recall(x, x + 100), (0.0, 0.0))

  def test_a_collapsed_generator_is_precise_and_covers_nothing(self):
    reference = np.random.default_rng(0).normal(size=(20, 30)) + 5
    generated = np.repeat(reference.mean(0, keepdims=True), 50, axis=0)
    np.testing.assert_array_equal(pr.knn_radii(generated), np.zeros(50))
    self.assertEqual(pr.precision_recall(generated, reference), (1.0, 0.0))

  def test_copies_of_a_feature_are_its_neighbours(self):
    x = np.array([[0.0], [0.0], [2.0], [5.0]])
    np.testing.assert_array_equal(pr.knn_radii(x, 1), [0, 0, 4, 9])
    np.testing.assert_array_equal(pr.knn_radii(x, 2), [4, 4, 4, 25])

  @parameterized.parameters(("generated", 3, 9), ("reference", 9, 2))
  def test_too_few_samples_are_refused(self, name, generated, reference):
    sets = np.ones((generated, 4)), np.ones((reference, 4))
    with self.assertRaisesRegex(
      ValueError, f"k=3 need at least 4 samples, the {name} set has [23]"
    ):
      pr.precision_recall(*sets)

  def test_wrong_arguments_are_refused(self):
    x = np.ones((9, 4))
    with self.assertRaisesRegex(ValueError, "k=0 must be at least 1"):
      pr.knn_radii(x, 0)
    with self.assertRaisesRegex(ValueError, "same dimension"):
      pr.precision_recall(x, np.ones((9, 5)))
    with self.assertRaisesRegex(ValueError, "must be finite"):
      pr.knn_radii(x * np.nan)


if __name__ == "__main__":
  absltest.main()
