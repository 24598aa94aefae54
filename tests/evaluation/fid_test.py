"""Streams, rounding, files and refusals; tests/parity has recorded values."""

import functools
import pathlib

import numpy as np
from absl.testing import parameterized

from moh_jax.evaluation import fid
from moh_jax.evaluation.fid import moments
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

  def test_what_has_no_covariance_or_score_is_refused(self):
    with self.assertRaisesRegex(ValueError, "at least 2 samples, there are 1"):
      moments(_features(1)).gaussian()
    for value in (np.nan, np.inf):
      features = _features(5)
      features[2, 1] = value
      with np.errstate(invalid="ignore"):
        seen = moments(features)
      with self.assertRaisesRegex(ValueError, "must be finite"):
        seen.gaussian()
    for logits in (np.zeros((0, 3)), np.full((2, 3), np.nan)):
      with self.assertRaisesRegex(ValueError, "at least 1 sample and finite"):
        fid.block_score(logits)
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

  @parameterized.parameters(("generated", 3, 9), ("reference", 9, 2))
  def test_too_few_samples_are_refused(self, name, generated, reference):
    sets = np.ones((generated, 4)), np.ones((reference, 4))
    with self.assertRaisesRegex(
      ValueError, f"k=3 need at least 4 samples, the {name} set has [23]"
    ):
      fid.precision_recall(*sets)
    with self.assertRaisesRegex(ValueError, "must be finite"):
      fid.knn_radii(np.full((9, 4), np.nan))


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
    ("note", {"made_with": np.frombuffer(b"[1", np.uint8)}, "made_with"),
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
