import os
import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import statistics_files
from moh_jax.evaluation.statistics import moments

_RECORDED = (
  pathlib.Path(__file__).parents[1] / "goldens/fid_metrics/adm_reference.npz"
)
_DIMS = (24, 63)


_MADE_WITH = {"resize": "tf1", "inception": "ab12"}


def _statistics():
  rng = np.random.default_rng(0)
  pair = (moments(rng.normal(size=(9, dim))).gaussian() for dim in _DIMS)
  return statistics_files.Statistics(*pair, _MADE_WITH)


class StatisticsFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = pathlib.Path(self.create_tempdir().full_path) / "stats.npz"

  def _read(self, path=None):
    return statistics_files.read_statistics(path or self.file, *_DIMS)

  def test_reads_what_it_wrote(self):
    written = _statistics()
    statistics_files.write_statistics(self.file, written)
    self.assertTrue(statistics_files.has_statistics(self.file))
    read = self._read()
    self.assertEqual(read.made_with, _MADE_WITH)
    for name in ("pool3", "spatial"):
      got, want = getattr(read, name), getattr(written, name)
      np.testing.assert_array_equal(got.mean, want.mean)
      np.testing.assert_array_equal(got.covariance, want.covariance)

  def test_file_of_pytorch_fid_has_no_spatial_features(self):
    with np.load(_RECORDED) as stored:
      np.savez(self.file, mu=stored["mu"], sigma=stored["sigma"])
    read = self._read()
    self.assertIsNone(read.spatial)
    self.assertEqual(read.made_with, {})
    read.check_made_with(_MADE_WITH, "x.npz")  # it may be the same

  @parameterized.parameters(
    ({"resize": "ptfid"}, "x.npz: .* resize='tf1', not 'ptfid'"),
    ({"inception": "cd"}, "x.npz: .* inception='ab12', not 'cd'"),
  )
  def test_statistics_made_otherwise_are_refused(self, ours, text):
    with self.assertRaisesRegex(ValueError, text):
      _statistics().check_made_with({**_MADE_WITH, **ours}, "x.npz")

  def test_damaged_description_is_named(self):
    with np.load(_RECORDED) as stored:
      made_with = np.frombuffer(b"[1", np.uint8)
      np.savez(self.file, **stored, made_with=made_with)
    with self.assertRaisesRegex(ValueError, "stats.npz: made_with"):
      self._read()

  def test_writes_the_names_of_the_recorded_file(self):
    statistics_files.write_statistics(self.file, _statistics())
    with np.load(self.file) as ours, np.load(_RECORDED) as theirs:
      self.assertEqual(set(ours) - {"made_with"}, set(theirs) - {"arr_0"})
      for name in set(ours) - {"made_with"}:
        self.assertEqual(ours[name].shape, theirs[name].shape)
        self.assertEqual(ours[name].dtype, np.float64)

  def test_float32_becomes_float64(self):
    with np.load(_RECORDED) as stored:
      np.savez(self.file, **{k: np.float32(stored[k]) for k in stored})
    self.assertEqual(self._read().pool3.covariance.dtype, np.float64)

  def test_mu_decides(self):
    np.savez(self.file, np.zeros(3), sigma=np.zeros(3))
    self.assertFalse(statistics_files.has_statistics(self.file))
    self.assertFalse(statistics_files.has_statistics(self.file.parent))
    self.assertTrue(statistics_files.has_statistics(_RECORDED))

  @parameterized.named_parameters(
    ("missing", {"sigma_s": None}, r"lacks \['sigma_s'\]"),
    ("misshapen", {"mu_s": np.zeros(62)}, r"mu_s has .*\(62,\).*\(63,\)"),
    ("whole", {"mu": np.zeros(24, int)}, "mu has dtype int64"),
    ("objects", {"mu": np.array([None])}, "damaged npz"),
    ("broken", {"sigma": np.full((24, 24), np.nan)}, "sigma holds NaN"),
  )
  def test_other_content_is_refused(self, changes, pattern):
    with np.load(_RECORDED) as stored:
      arrays = {**stored, **changes}
    np.savez(self.file, **{k: v for k, v in arrays.items() if v is not None})
    with self.assertRaisesRegex(ValueError, f"stats.npz: .*{pattern}"):
      self._read()

  def test_missing_and_other_files_are_named(self):
    with self.assertRaisesRegex(FileNotFoundError, r"stats.npz: no such file"):
      self._read()
    self.file.write_text("text")
    with self.assertRaisesRegex(ValueError, "stats.npz: not an npz file"):
      self._read()

  def test_failure_leaves_the_old_file_alone(self):
    self.file.write_text("old")
    with (
      mock.patch.object(os, "replace", side_effect=OSError("disk")),
      self.assertRaisesRegex(OSError, "disk"),
    ):
      statistics_files.write_statistics(self.file, _statistics())
    self.assertEqual(self.file.read_text(), "old")
    self.assertLen(os.listdir(self.file.parent), 1)

  def test_places_that_cannot_be_written_are_refused(self):
    folder = self.file.parent
    with self.assertRaisesRegex(ValueError, "is a directory"):
      statistics_files.check_writable(folder)
    with self.assertRaisesRegex(FileNotFoundError, "no directory .*/no; creat"):
      statistics_files.check_writable(folder / "no" / "stats.npz")


if __name__ == "__main__":
  absltest.main()
