"""FID and its images: streams, rounding, files and refusals.

tests/parity has recorded values.
"""

import functools
import pathlib
import re

import numpy as np
from absl.testing import parameterized
from PIL import ExifTags, Image

from moh_jax.evaluation import fid, image_metrics
from moh_jax.evaluation.fid import moments
from moh_jax.evaluation.image_metrics import open_images
from moh_jax.models.inception import Features
from tests import folders

_RECORDED = (
  pathlib.Path(__file__).parents[1] / "goldens/fid_metrics/adm_reference.npz"
)
_DIMS = (24, 63)
_MADE_WITH = {"resize": "tf1", "inception": "ab12"}


def _features(count, dim=6, offset=0.0):
  rng = np.random.default_rng(0)
  mix = rng.normal(size=(dim, dim))
  return np.float32(rng.normal(size=(count, dim)) @ mix + offset)


class MomentsTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 1e4)
  def test_uneven_batches_equal_one_pass(self, offset):
    features = _features(50, offset=offset)
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

  def test_score_of_certain_classes_is_their_number(self):
    for size in (1e3, 1e30):  # and a class that no sample has
      score = fid.block_score(size * np.eye(6, 7, dtype=np.float32))
      self.assertAlmostEqual(score, 6, places=12)


def _distances(x, y):
  return ((x[:, None].astype(np.float64) - y[None]) ** 2).sum(-1)


class PrecisionRecallTest(parameterized.TestCase):
  def test_a_copy_of_the_neighbour_lies_on_the_surface(self):
    # Irrational coordinates: only equal rounding makes the distances equal.
    features = np.random.default_rng(0).normal(size=(4, 2048)) + 100
    radii = fid.knn_radii(features, 3)
    for i in range(4):
      farthest = np.argmax(_distances(features[i : i + 1], features)[0])
      point = features[farthest : farthest + 1]
      inside = fid.in_manifold(point, features[i : i + 1], radii[i : i + 1])
      self.assertTrue(inside[0])
      smaller = np.nextafter(radii[i : i + 1], 0)
      outside = fid.in_manifold(point, features[i : i + 1], smaller)
      self.assertFalse(outside[0])
    copies = np.repeat(features[:1], 50, axis=0)
    np.testing.assert_array_equal(fid.knn_radii(copies), np.zeros(50))


class StatisticsFilesTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.file = self.root / "stats.npz"

  def _read(self):
    return fid.read_statistics(self.file, *_DIMS)

  def test_reads_what_it_wrote_under_the_names_of_the_recorded_file(self):
    pair = [moments(_features(9, dim)).gaussian() for dim in _DIMS]
    written = fid.Statistics(*pair, _MADE_WITH)
    fid.write_statistics(self.file, written)
    self.assertTrue(fid.has_statistics(self.file))
    self.assertFalse(fid.has_statistics(self.file.parent))
    read = self._read()
    self.assertEqual(read.made_with, _MADE_WITH)
    changed = bytearray(self.file.read_bytes())
    changed[200] ^= 1
    self.file.with_name("changed.npz").write_bytes(changed)
    with self.assertRaisesRegex(ValueError, "changed.npz: damaged npz file"):
      fid.read_statistics(self.file.with_name("changed.npz"), 24, 63)
    for name in ("pool3", "spatial"):
      got, want = getattr(read, name), getattr(written, name)
      np.testing.assert_array_equal(got.mean, want.mean)
      np.testing.assert_array_equal(got.covariance, want.covariance)
    with np.load(self.file) as ours, np.load(_RECORDED) as theirs:
      self.assertEqual(set(ours) - {"made_with"}, set(theirs) - {"arr_0"})
      for name in set(ours) - {"made_with"}:
        self.assertEqual(ours[name].shape, theirs[name].shape)
        self.assertEqual(ours[name].dtype, np.float64)
    for name, other in (("resize", "ptfid"), ("inception", "cd")):
      message = f"x.npz: .* {name}='{_MADE_WITH[name]}', not '{other}'"
      with self.assertRaisesRegex(ValueError, message):
        read.check_made_with({**_MADE_WITH, name: other}, "x.npz")

  @parameterized.parameters(np.float16, np.float32, np.float64)
  def test_rounded_covariances_of_few_or_equal_images_are_covariances(self, to):
    for features in (_features(9, 24), np.ones((9, 24))):
      covariance = moments(features).gaussian().covariance
      self.assertTrue(fid._is_covariance(covariance.astype(to)))

  def test_file_of_pytorch_fid_has_no_spatial_features(self):
    with np.load(_RECORDED) as stored:
      np.savez(self.file, **{k: np.float32(stored[k]) for k in ("mu", "sigma")})
    read = self._read()
    self.assertIsNone(read.spatial)
    fid.write_statistics(self.file, read)
    self.assertIsNone(self._read().spatial)
    self.assertEqual(read.pool3.covariance.dtype, np.float64)
    self.assertEqual(read.made_with, {})
    read.check_made_with(_MADE_WITH, "x.npz")  # it may be the same

  @parameterized.named_parameters(
    ("missing", {"sigma_s": None}, r"lacks \['sigma_s'\]"),
    ("misshapen", {"mu_s": np.zeros(62)}, r"mu_s has .*\(62,\).*\(63,\)"),
    ("whole", {"mu": np.zeros(24, int)}, "mu has dtype int64"),
    ("objects", {"mu": np.array([None])}, "damaged npz"),
    ("broken", {"sigma": np.full((24, 24), np.nan)}, "sigma holds NaN"),
    ("askew", {"sigma": np.tri(24)}, "sigma must be a covariance"),
    ("negative", {"sigma": np.diag([1.0] * 23 + [-1e-3])}, "without negative"),
    ("note", {"made_with": np.frombuffer(b"[1", np.uint8)}, "made_with"),
    (
      "endless",
      {"made_with": np.zeros((64 << 20) + 1, np.uint8)},
      "made_with: .*most",
    ),
  )
  def test_other_content_is_refused(self, changes, pattern):
    with np.load(_RECORDED) as stored:
      arrays = {**stored, **changes}
    np.savez(self.file, **{k: v for k, v in arrays.items() if v is not None})
    with self.assertRaisesRegex(ValueError, f"stats.npz: .*{pattern}"):
      self._read()
    self.file.write_text("text")
    with self.assertRaisesRegex(ValueError, "stats.npz: not an npz file"):
      self._read()


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

  def test_features_that_are_not_finite_are_refused(self):
    def extract(images):
      found = self._extract(images)
      return found._replace(pool3=np.nan * found.pool3)

    images = open_images(self.file)
    with self.assertRaisesRegex(FloatingPointError, "features of .*s.npz"):
      image_metrics.summarize(extract, images, 8)

  def test_one_image_has_no_covariance(self):
    np.savez(self.file, _MANY[:1])
    summary = self._summary(8, distributions=False, score=True)
    self.assertAlmostEqual(summary.inception_score, 1.0)
    self.assertEqual(
      (summary.pool3, summary.spatial, summary.features), (None,) * 3
    )
