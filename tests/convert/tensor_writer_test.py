"""Safetensors written tensor by tensor."""

import json
import os
import pathlib
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from moh_jax.convert import tensor_writer
from moh_jax.convert.tensor_writer import Planned


def _planned(**arrays):
  return [
    Planned((name,), (array.shape,), lambda array=array: [array])
    for name, array in arrays.items()
  ]


class FileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "out"

  @parameterized.product(dtype=tuple(tensor_writer.DTYPES), rows=(1, 24, 2**25))
  def test_safetensors_reads_it(self, dtype, rows):
    rng = np.random.default_rng(0)
    arrays = {
      "matrix": rng.normal(size=(5, 3)).astype(np.float32).T,
      "scalar": np.float32(7),
      "none": np.zeros((0, 3), np.float32),
      "stack": rng.normal(size=(2, 3, 4)).astype(np.float32),
    }
    with mock.patch.object(tensor_writer, "_ROWS_BYTES", rows):
      planned = _planned(**{k: np.asarray(v) for k, v in arrays.items()})
      tensor_writer.write_file(self.path, planned, dtype, {"format": "pt"})
    read = safetensors.numpy.load_file(self.path)
    self.assertCountEqual(read, arrays)
    for name, array in arrays.items():
      want = np.asarray(array).astype(dtype)
      np.testing.assert_array_equal(read[name], want, strict=True)
    with safetensors.safe_open(self.path, "numpy") as file:
      self.assertEqual(file.metadata(), {"format": "pt"})

  def test_tensors_begin_at_a_multiple_of_eight(self):
    for length in range(8):
      planned = _planned(**{"w" * (length + 1): np.ones(2, np.float32)})
      tensor_writer.write_file(self.path, planned, "float32", {})
      size = int.from_bytes(self.path.read_bytes()[:8], "little")
      self.assertEqual(size % 8, 0)

  def test_rounds_to_the_nearest_even(self):
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -np.inf, 3e38])
    tensor_writer.write_file(self.path, _planned(w=values), "bfloat16", {})
    read = safetensors.numpy.load_file(self.path)["w"]
    np.testing.assert_array_equal(read, values.astype(ml_dtypes.bfloat16))
    self.assertEqual([float(x) for x in read[:2]], [1.0, 1 + 2**-6])

  def test_failure_leaves_the_old_file(self):
    tensor_writer.write_file(self.path, _planned(w=np.ones(2)), "float32", {})
    content = self.path.read_bytes()

    def fail():
      raise OSError("gone")

    planned = [*_planned(v=np.ones(3)), Planned(("w",), ((2,),), fail)]
    with self.assertRaisesRegex(OSError, "gone"):
      tensor_writer.write_file(self.path, planned, "float32", {})
    self.assertEqual(self.path.read_bytes(), content)
    self.assertEqual(list(self.path.parent.iterdir()), [self.path])

  @parameterized.parameters("fsync", "replace")
  def test_failing_disk_leaves_the_old_file(self, step):
    tensor_writer.write_file(self.path, _planned(w=np.ones(2)), "float32", {})
    content = self.path.read_bytes()
    with mock.patch.object(os, step, side_effect=OSError("disk")):
      with self.assertRaisesRegex(OSError, "disk"):
        tensor_writer.write_file(
          self.path, _planned(w=np.zeros(2)), "float32", {}
        )
    self.assertEqual(self.path.read_bytes(), content)
    self.assertEqual(list(self.path.parent.iterdir()), [self.path])

  def test_bad_targets_are_named(self):
    self.path.mkdir()
    with self.assertRaisesRegex(ValueError, "out: is a directory"):
      tensor_writer.write_file(self.path, [], "float32", {})

  def test_parent_folders_are_made(self):
    path = self.path / "new" / "deep" / "out"
    tensor_writer.write_file(path, _planned(w=np.ones(2)), "float32", {})
    self.assertTrue(path.is_file())


class FolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _write(self, limit, *sizes):
    arrays = {f"t{i}": np.full(n, i, np.float32) for i, n in enumerate(sizes)}
    tensor_writer.write_folder(
      self.folder, _planned(**arrays), "float32", {}, limit
    )
    return sorted(path.name for path in self.folder.iterdir())

  @parameterized.parameters(
    (100, (10, 15), ["model.safetensors"]),
    (
      40,
      (10, 1, 9, 20, 1),
      [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
      + ["model.safetensors.index.json"],
    ),
  )
  def test_shards_are_filled_in_order(self, limit, sizes, names):
    self.assertEqual(self._write(limit, *sizes), names)

  def test_index_names_the_file_of_every_tensor(self):
    self._write(40, 10, 1, 9)
    index = json.loads(
      (self.folder / "model.safetensors.index.json").read_text()
    )
    self.assertEqual(index["metadata"], {"total_size": 80})
    for name, file in index["weight_map"].items():
      self.assertIn(name, safetensors.numpy.load_file(self.folder / file))
    self.assertCountEqual(index["weight_map"], ["t0", "t1", "t2"])


class NewFolderTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "new"

  def test_appears_at_the_end(self):
    with tensor_writer.new_folder(self.path) as folder:
      (folder / "a").write_text("1")
      self.assertFalse(self.path.exists())
    self.assertEqual((self.path / "a").read_text(), "1")
    self.assertLen(list(self.path.parent.iterdir()), 1)

  def test_error_leaves_what_was_there(self):
    self.path.mkdir()
    with self.assertRaises(KeyError):
      with tensor_writer.new_folder(self.path) as folder:
        (folder / "a").write_text("1")
        raise KeyError
    self.assertEmpty(list(self.path.iterdir()))
    self.assertLen(list(self.path.parent.iterdir()), 1)

  def test_holding_something_is_refused(self):
    self.path.mkdir()
    (self.path / "a").write_text("1")
    with self.assertRaisesRegex(ValueError, "new holds 'a'; choose a new or"):
      with tensor_writer.new_folder(self.path):
        self.fail("entered")


if __name__ == "__main__":
  absltest.main()
