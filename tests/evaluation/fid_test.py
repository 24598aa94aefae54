"""FID and its images: streams, rounding, files and refusals.

tests/parity has recorded values.
"""

import functools
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.evaluation import fid
from moh_jax.evaluation.fid import moments, open_images
from moh_jax.models.inception import Features
from tests import folders

_DIMS = (24, 63)
_SHAPES = {"mu": 24, "sigma": (24, 24), "mu_s": 63, "sigma_s": (63, 63)}


def _features(count, dim, offset=0.0):
  rng = np.random.default_rng(0)
  mix = rng.normal(size=(dim, dim))
  return np.float32(rng.normal(size=(count, dim)) @ mix + offset)


class MomentsTest(absltest.TestCase):
  def test_uneven_batches_equal_one_pass(self):
    features = _features(50, 6, offset=1e4)
    parts = np.split(features, np.cumsum((1, 17, 3, 28)))
    seen = functools.reduce(lambda seen, x: moments(x, seen), parts, None)
    streamed, exact = seen.gaussian(), features.astype(np.float64)
    self.assertEqual(streamed.mean.dtype, np.float64)
    np.testing.assert_allclose(streamed.mean, exact.mean(0), rtol=1e-13)
    # Sums of squares would lose 8 digits to the offset.
    np.testing.assert_allclose(
      streamed.covariance, np.cov(exact.T), rtol=1e-9, atol=1e-11
    )
    np.testing.assert_array_equal(streamed.covariance, streamed.covariance.T)


class StatisticsTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.file = self.root / "stats.npz"

  def test_reads_what_it_wrote(self):
    pair = [moments(_features(9, dim)).gaussian() for dim in _DIMS]
    for written in (fid.Statistics(*pair), fid.Statistics(pair[0], None)):
      fid.write_statistics(self.file, written)
      read = fid.read_statistics(self.file, *_DIMS)
      for got, want in zip(read, written):
        np.testing.assert_equal(got, want)
    with np.load(self.file) as theirs:
      self.assertEqual(set(theirs), {"mu", "sigma"})
    self.assertIsNone(fid.read_statistics(self.root, *_DIMS))

  @parameterized.parameters(
    ({"mu_s": np.zeros(62)}, "mu_s of shape"),
    ({"sigma": np.full((24, 24), np.nan)}, "sigma of shape .* must be finite"),
  )
  def test_other_content_is_refused(self, changes, pattern):
    arrays = {name: np.zeros(shape) for name, shape in _SHAPES.items()}
    np.savez(self.file, **arrays | changes)
    with self.assertRaisesRegex(ValueError, f"stats.npz: .*{pattern}"):
      fid.read_statistics(self.file, *_DIMS)


_IMAGES = np.random.RandomState(0).randint(0, 256, (53, 6, 5, 3), np.uint8)


def _read(images, batch_size=3):
  return np.concatenate(list(images.batches(batch_size)))


class ImagesTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.file = self.root / "images.npz"

  def _save(self, name, image):
    file = self.root / "folder" / name
    file.parent.mkdir(exist_ok=True, parents=True)
    Image.fromarray(image).save(file, lossless=True)

  def test_npz_files_of_any_kind(self):
    grey = _IMAGES[..., :1]
    for save, images in ((np.savez, _IMAGES), (np.savez_compressed, grey)):
      save(self.file, images, np.arange(53))  # arr_1: labels
      found = open_images(self.file)
      self.assertEqual(found.count, 53)
      expected = np.broadcast_to(images, _IMAGES.shape)
      np.testing.assert_array_equal(_read(found, 20), expected)

  @parameterized.parameters(
    ({"arr_0": _IMAGES.astype(np.float32) / 255}, "dtype float32"),
    ({"arr_0": _IMAGES.transpose(0, 3, 1, 2)}, r"shape \(53, 3, 6, 5\)"),
    ({"arr_0": np.asfortranarray(_IMAGES)}, "in C order"),
    ({"images": _IMAGES}, "no npz file"),
    ({"arr_0": _IMAGES}, "no npz file", 1000),  # bytes of a part of it
  )
  def test_other_content_is_refused(self, arrays, pattern, size=None):
    np.savez(self.file, **arrays)
    self.file.write_bytes(self.file.read_bytes()[:size])
    with self.assertRaisesRegex(ValueError, f"images.npz: .*{pattern}"):
      open_images(self.file)

  def test_folders_hold_what_npz_files_hold_with_classes_mixed(self):
    for i, image in enumerate(_IMAGES[:20]):
      self._save(f"{i // 10}/{i}.{'png' if i % 2 else 'bmp'}", image)
    images = open_images(self.root / "folder")
    pixels = _read(images, 6)
    self.assertEqual(
      sorted(image.tobytes() for image in pixels),
      sorted(image.tobytes() for image in _IMAGES[:20]),
    )
    first = {image.tobytes() for image in pixels[:10]}
    self.assertLess(sum(x.tobytes() in first for x in _IMAGES[:10]), 10)

  def test_several_sizes_are_cropped_to_one_or_refused(self):
    self._save("0.png", _IMAGES[0, ..., 0])  # grey becomes RGB
    self._save("1.png", _IMAGES[1, :4])
    folder = self.root / "folder"
    with self.assertRaisesRegex(ValueError, "1.png has 4 rows x 5 columns"):
      _read(open_images(folder))
    pixels = _read(open_images(folder, image_size=4))
    # 4 rows x 5 columns need no other size: the centre begins at column 0.
    for expected in (_IMAGES[1, :4, :4], pixels[..., :1]):
      self.assertEqual((pixels == expected).all((1, 2, 3)).sum(), 1)

  def _extract(self, images):
    x = images.astype(np.float32) / 255
    pool3 = x.reshape(len(x), -1)[:, :10]
    return Features(pool3, x[:, :2, :2] ** 2, 3 * pool3[:, :5])

  @parameterized.parameters((8, 15), (64, 5000))
  def test_any_batch_size_equals_one_pass(self, batch_size, block):
    np.savez(self.file, _IMAGES)
    self.enterContext(mock.patch.object(fid, "INCEPTION_BLOCK", block))
    images = open_images(self.file)
    summary = fid.summarize(self._extract, images, batch_size, keep=True)
    pool3, spatial, logits = self._extract(_IMAGES)
    for got, features in zip(
      summary.statistics, (pool3, spatial.reshape(53, -1))
    ):
      features = features.astype(np.float64)
      np.testing.assert_allclose(got.mean, features.mean(0), rtol=1e-13)
      np.testing.assert_allclose(got.covariance, np.cov(features.T), atol=1e-14)
    # The short block counts like the others.
    blocks = [logits[i : i + block] for i in range(0, 53, block)]
    expected = np.mean([fid.block_score(x) for x in blocks])
    self.assertAlmostEqual(summary.inception_score, expected, places=13)
    np.testing.assert_array_equal(summary.features, pool3)

  def test_what_has_no_score_is_refused(self):
    np.savez(self.file, _IMAGES)

    def nan(images):
      return Features(*(np.nan * x for x in self._extract(images)))

    with self.assertRaisesRegex(FloatingPointError, "features of .*s.npz"):
      fid.summarize(nan, open_images(self.file), 8)
    np.savez(self.file, _IMAGES[:1])
    with self.assertRaisesRegex(
      ValueError, "2 images or more are needed, not 1"
    ):
      fid.summarize(self._extract, open_images(self.file), 8)
