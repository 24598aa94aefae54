"""Streaming, with a small stand-in for the network."""

import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import fid, image_metrics
from moh_jax.evaluation.image_sets import open_images
from moh_jax.models.inception import Features

_COUNT = 53
_IMAGES = np.random.RandomState(0).randint(0, 256, (_COUNT, 4, 4, 3), np.uint8)
_EVERYTHING = {"distributions": True, "score": True, "keep_features": True}


def _extract(images):
  x = images.astype(np.float32) / 255
  pool3 = x.reshape(len(x), -1)[:, :10]
  return Features(pool3, x[:, :2, :2] ** 2, 3 * pool3[:, :5])


class SummarizeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.images = self._set(_IMAGES)
    small = {"_CHUNK": 20, "INCEPTION_BLOCK": 15}
    self.enter_context(mock.patch.multiple(image_metrics, **small))

  def _set(self, images):
    np.savez(self.folder / f"{len(images)}.npz", images)
    return open_images(self.folder / f"{len(images)}.npz")

  def _summary(self, batch_size, **wanted):
    return image_metrics.summarize(_extract, self.images, batch_size, **wanted)

  @parameterized.parameters(1, 8, 20, 64)
  def test_any_batch_size_equals_one_pass(self, batch_size):
    summary = self._summary(batch_size, **_EVERYTHING)
    pool3, spatial, logits = _extract(_IMAGES)
    self.assertEqual(summary.count, _COUNT)
    for got, features in (
      (summary.pool3, pool3),
      (summary.spatial, spatial.reshape(_COUNT, -1)),
    ):
      features = features.astype(np.float64)
      np.testing.assert_allclose(got.mean, features.mean(0), rtol=1e-13)
      np.testing.assert_allclose(got.covariance, np.cov(features.T), atol=1e-14)
    self.assertAlmostEqual(
      summary.inception_score, fid.inception_score(logits, 15), places=13
    )
    np.testing.assert_array_equal(summary.features, pool3)
    self.assertEqual(summary.features.dtype, np.float32)

  def test_keeps_only_what_is_asked_for(self):
    summary = self._summary(8, distributions=False, score=True)
    self.assertIsNone(summary.pool3)
    self.assertIsNone(summary.spatial)
    self.assertIsNone(summary.features)
    summary = self._summary(8, distributions=False, keep_features=True)
    self.assertIsNone(summary.inception_score)
    self.assertLen(summary.features, _COUNT)

  def test_all_batches_have_one_size(self):
    seen = []

    def extract(images):
      seen.append(len(images))
      return _extract(images)

    image_metrics.summarize(extract, self.images, 8)
    self.assertEqual(seen, [8] * 7)

  def test_progress_counts_images(self):
    done = []
    image_metrics.summarize(_extract, self.images, 8, progress=done.append)
    self.assertEqual(done, [8] * 6 + [5])

  def test_one_image_has_no_covariance(self):
    one = self._set(_IMAGES[:1])
    with self.assertRaisesRegex(ValueError, "1.npz: has one image"):
      image_metrics.summarize(_extract, one, 8)
    summary = image_metrics.summarize(
      _extract, one, 8, distributions=False, score=True
    )
    self.assertAlmostEqual(summary.inception_score, 1.0)


if __name__ == "__main__":
  absltest.main()
