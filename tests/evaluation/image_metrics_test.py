"""Sets of images, and their features from a small stand-in for the network."""

import re

import numpy as np
from absl.testing import parameterized
from PIL import ExifTags, Image

from moh_jax.evaluation import fid, image_metrics
from moh_jax.evaluation.image_metrics import open_images
from moh_jax.models.inception import Features
from tests import folders

_IMAGES = np.random.RandomState(0).randint(0, 256, (7, 6, 5, 3), np.uint8)
_COUNT = 53
_MANY = np.random.RandomState(0).randint(0, 256, (_COUNT, 4, 4, 3), np.uint8)


def _read(images, batch_size=3):
  return np.concatenate(list(images.batches(batch_size)))


class ImageSetTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.file = self.root / "images.npz"

  def _refused(self, pattern, path=None, error=ValueError):
    path = path or self.file
    with self.assertRaisesRegex(error, f"{re.escape(str(path))}.*{pattern}"):
      _read(open_images(path))

  def _save(self, name, image):
    file = self.root / name
    file.parent.mkdir(exist_ok=True)
    Image.fromarray(image).save(file, lossless=True)


class NpzTest(ImageSetTest):
  @parameterized.product(
    save=(np.savez, np.savez_compressed), batch_size=(1, 3, 7, 50)
  )
  def test_reads_batches_in_order(self, save, batch_size):
    save(self.file, _IMAGES, np.arange(7))  # arr_1: labels
    images = open_images(self.file)
    self.assertEqual(images.count, 7)
    self.assertEqual(images.size, (6, 5))
    batches = list(images.batches(batch_size))
    self.assertTrue(all(len(b) == batch_size for b in batches[:-1]))
    np.testing.assert_array_equal(np.concatenate(batches), _IMAGES)
    np.testing.assert_array_equal(_read(images), _IMAGES)  # once more

  def test_grey_images_and_columns_first(self):
    expected = _IMAGES[..., :1].repeat(3, -1)
    for stored in (_IMAGES[..., :1], np.asfortranarray(_IMAGES[..., :1])):
      np.savez(self.file, stored)
      np.testing.assert_array_equal(_read(open_images(self.file)), expected)

  @parameterized.named_parameters(
    ("float", _IMAGES.astype(np.float32) / 255, "dtype float32"),
    ("int", _IMAGES.astype(np.int64), "dtype int64"),
    ("objects", np.array([None, 1]), "dtype object"),
    ("nchw", _IMAGES.transpose(0, 3, 1, 2), r"shape \(7, 3, 6, 5\)"),
    ("grey", _IMAGES[..., 0], r"shape \(7, 6, 5\)"),
    ("empty", _IMAGES[:0], "holds no image"),
  )
  def test_other_content_is_refused(self, array, pattern):
    np.savez(self.file, np.array(array))
    self._refused(pattern)

  def test_other_and_damaged_files_are_refused(self):
    self._refused("no such file", error=FileNotFoundError)
    np.savez(self.file, images=_IMAGES)
    self._refused("holds .'images',.; images must be arr_0 of dtype uint8")
    np.savez(self.file, _IMAGES)
    content = self.file.read_bytes()
    half = len(content) // 2
    flipped = bytes([content[half] ^ 255])
    for damaged, message in (
      (b"text", "not an npz file"),
      (content[:half], "truncated"),
      (content[:half] + flipped + content[half + 1 :], "damaged .*Bad CRC"),
    ):
      self.file.write_bytes(damaged)
      self._refused(message)


class FolderTest(ImageSetTest):
  def test_reads_what_the_npz_file_holds(self):
    # In any order, from subfolders and in any lossless format.
    names = ("a/0.png", "a/1.bmp", "a/10.PNG", "b/0.tif", "c.png", "d.webp")
    for name, image in zip(names, _IMAGES):
      self._save(name, image)
    (self.root / "notes.txt").write_text("not an image")
    self._save(".thumbnails/0.png", _IMAGES[-1])
    images = open_images(self.root)
    self.assertEqual((images.count, images.size), (6, (6, 5)))
    pixels = _read(images, 4)
    self.assertEqual(
      sorted(image.tobytes() for image in pixels),
      sorted(image.tobytes() for image in _IMAGES[:6]),
    )
    np.testing.assert_array_equal(pixels, _read(open_images(self.root), 6))

  def test_classes_are_mixed(self):
    for label in range(4):
      for i in range(25):
        pixels = np.full((2, 2, 3), label, np.uint8)
        self._save(f"{label}/{i:03d}.png", pixels)
    labels = _read(open_images(self.root), 7)[:, 0, 0, 0]
    for start in range(0, 100, 20):
      self.assertLen(set(labels[start : start + 20]), 4)

  @parameterized.parameters("jpg", "png", "tif")
  def test_images_that_a_camera_turned_are_upright(self, suffix):
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for i, pixels in enumerate((_IMAGES[0], _IMAGES[1].transpose(1, 0, 2))):
      options = {"exif": turned} if i else {}
      Image.fromarray(pixels).save(self.root / f"{i}.{suffix}", **options)
    images = open_images(self.root)
    self.assertEqual(images.size, (6, 5))
    self.assertEqual(_read(images).shape, (2, 6, 5, 3))

  def test_several_sizes_are_cropped_to_one_or_refused(self):
    self._save("0.png", _IMAGES[0, ..., 0])  # grey becomes RGB
    self._save("1.png", _IMAGES[1, :4])
    self._refused(
      "one size.*0.png has 6 rows x 5 columns.*1.png has 4 rows x 5 columns",
      self.root,
    )
    images = open_images(self.root, image_size=4)
    self.assertEqual(images.size, (4, 4))
    pixels = _read(images)
    self.assertEqual(pixels.shape, (2, 4, 4, 3))
    # 4 rows x 5 columns need no other size: the centre begins at column 0.
    for expected in (_IMAGES[1, :4, :4], pixels[..., :1]):
      self.assertEqual((pixels == expected).all((1, 2, 3)).sum(), 1)
    with self.assertRaisesRegex(ValueError, "1.png has 4 rows.*--image-size 5"):
      open_images(self.root, image_size=5)

  def test_what_holds_no_whole_image_is_refused(self):
    self._refused("no image file", self.root, FileNotFoundError)
    file = self.root / "0.png"
    self._save("0.png", _IMAGES[0])
    file.write_bytes(file.read_bytes()[:60])
    self._refused("0.png: damaged", self.root)
    file.write_text("text")
    self._refused("not an image", self.root)


class SummarizeTest(ImageSetTest):
  def setUp(self):
    super().setUp()
    np.savez(self.file, _MANY)
    self.sizes = []

  def _extract(self, images):
    self.sizes.append(len(images))
    x = images.astype(np.float32) / 255
    pool3 = x.reshape(len(x), -1)[:, :10]
    return Features(pool3, x[:, :2, :2] ** 2, 3 * pool3[:, :5])

  def _summary(self, batch_size, **options):
    images = open_images(self.file)
    return image_metrics.summarize(self._extract, images, batch_size, **options)

  @parameterized.product(batch_size=(1, 8, 20, 64), block=(15, 5000))
  def test_any_batch_size_equals_one_pass(self, batch_size, block):
    done = []
    summary = self._summary(
      batch_size,
      score=True,
      keep_features=True,
      block_size=block,
      progress=done.append,
    )
    # All batches have one size, and progress counts images.
    self.assertEqual(set(self.sizes), {batch_size})
    self.assertEqual((sum(done), summary.count), (_COUNT, _COUNT))
    pool3, spatial, logits = self._extract(_MANY)
    for got, features in (
      (summary.pool3, pool3),
      (summary.spatial, spatial.reshape(_COUNT, -1)),
    ):
      features = features.astype(np.float64)
      np.testing.assert_allclose(got.mean, features.mean(0), rtol=1e-13)
      np.testing.assert_allclose(got.covariance, np.cov(features.T), atol=1e-14)
    # The short block counts like the others.
    blocks = [logits[i : i + block] for i in range(0, _COUNT, block)]
    expected = np.mean([fid.block_score(x) for x in blocks])
    self.assertAlmostEqual(summary.inception_score, expected, places=13)
    np.testing.assert_array_equal(summary.features, pool3)
    self.assertEqual(summary.features.dtype, np.float32)

  def test_one_image_has_no_covariance(self):
    np.savez(self.file, _MANY[:1])
    summary = self._summary(8, distributions=False, score=True)
    self.assertAlmostEqual(summary.inception_score, 1.0)
    self.assertEqual(
      (summary.pool3, summary.spatial, summary.features), (None,) * 3
    )
