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


def _gaussians():
  rng = np.random.default_rng(0)
  return [moments(rng.normal(size=(9, dim))).gaussian() for dim in _DIMS]


class StatisticsFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.file = pathlib.Path(self.create_tempdir().full_path) / "stats.npz"

  def _read(self, path=None):
    return statistics_files.read_statistics(path or self.file, *_DIMS)

  def test_reads_what_it_wrote(self):
    gaussians = _gaussians()
    statistics_files.write_statistics(self.file, *gaussians)
    self.assertTrue(statistics_files.has_statistics(self.file))
    for got, want in zip(self._read(), gaussians):
      np.testing.assert_array_equal(got.mean, want.mean)
      np.testing.assert_array_equal(got.covariance, want.covariance)

  def test_writes_the_names_of_the_recorded_file(self):
    statistics_files.write_statistics(self.file, *_gaussians())
    with np.load(self.file) as ours, np.load(_RECORDED) as theirs:
      self.assertEqual(set(ours), set(theirs) - {"arr_0"})
      for name in ours:
        self.assertEqual(ours[name].shape, theirs[name].shape)
        self.assertEqual(ours[name].dtype, np.float64)

  def test_float32_becomes_float64(self):
    with np.load(_RECORDED) as stored:
      np.savez(self.file, **{k: np.float32(stored[k]) for k in stored})
    self.assertEqual(self._read()[0].covariance.dtype, np.float64)

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
      statistics_files.write_statistics(self.file, *_gaussians())
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
