"""Safetensors: read when they are used, in shards, and written."""

import json
import sys
import zipfile
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized

from moh_jax.convert import tensor_files
from tests.convert.stored import save_tensors
from tests.folders import FolderTest

_MODEL = "model.safetensors"


class ReadTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.path = self.root / "weights"

  @parameterized.parameters("float64", "float16", "int8", ml_dtypes.bfloat16)
  def test_values_shapes_and_dtypes_are_those_stored(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    tensors = {"view": values.T[::2], "scalar": values[1, 1]}
    tensors["none"] = values[:0]
    save_tensors(self.path, tensors, {"step": "7"})
    self.assertEqual(tensor_files.read_text(self.path), {"step": "7"})
    opened = tensor_files.open_tensors(self.path)
    self.assertEqual(opened.keys(), tensors.keys())
    for name, value in tensors.items():
      self.assertEqual(opened[name].shape, value.shape)
      if dtype != "int8":
        self.assertEqual(opened[name].dtype, str(value.dtype))
      np.testing.assert_array_equal(np.asarray(opened[name]), value)

  @parameterized.parameters(
    ("_orig_mod.module.{}", "module._orig_mod.{}"),
    ("_orig_mod.{}", "{}"),
    ("module.{}", "module.blocks.0._orig_mod.{}", "blocks.0.b"),
  )
  def test_prefixes_of_wrapped_modules_are_left_out(self, a, b, name="b"):
    save_tensors(self.path, {a.format("a"): np.ones(1), b.format("b"): [2.0]})
    read = tensor_files.read_tensors(self.path)
    self.assertEqual({n: x.item() for n, x in read.items()}, {"a": 1, name: 2})

  @parameterized.parameters(
    b"",
    b"version https://git-lfs.github.com/spec/v1\n",
    safetensors.numpy.save({"w": np.zeros(99)})[:-1],
  )
  def test_other_content_is_named(self, content):
    self.path.write_bytes(content)
    message = rf"{self.path}: no safetensors file [^\n]*\Z"
    with self.assertRaisesRegex(ValueError, message):
      tensor_files.open_tensors(self.path)

  def test_nothing_there(self):
    with self.assertRaisesRegex(FileNotFoundError, "weights: no such file"):
      tensor_files.open_tensors(self.path)
    with self.assertRaisesRegex(FileNotFoundError, r"holds no .safetensors"):
      tensor_files.open_tensors(self.root)

  def test_torch_files_name_the_extra_where_torch_is_missing(self):
    with zipfile.ZipFile(self.path, "w") as archive:
      archive.writestr("net/data.pkl", b"")
    with mock.patch.dict(sys.modules, {"torch": None}):
      message = r"weights: .*pip install '.\[torch\]'"
      with self.assertRaisesRegex(ValueError, message):
        tensor_files.open_tensors(self.path)


class ShardsTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.index = self.root / f"{_MODEL}.index.json"
    for index, name in enumerate("ab"):
      self._write(f"{index}.safetensors", name)

  def _write(self, file, name):
    save_tensors(self.root / file, {name: np.full(2, ord(name))})

  def _write_index(self, **weight_map):
    self.index.write_text(json.dumps({"weight_map": weight_map}))

  def _check(self, path):
    read = tensor_files.read_tensors(path)
    self.assertEqual(sorted(read), ["a", "b"])
    np.testing.assert_array_equal(read["b"], [98, 98])

  def test_reads_a_directory_and_only_what_an_index_lists(self):
    self._check(self.root)
    self._write("adapter_model.safetensors", "c")
    self._write_index(a="0.safetensors", b="1.safetensors")
    self._check(self.index)
    self._check(self.root)

  @parameterized.parameters(
    "consolidated.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
  )
  def test_model_safetensors_is_read_whatever_lies_beside_it(self, other):
    self._write(_MODEL, "c")
    self._write(other, "c")
    self.assertEqual(list(tensor_files.read_tensors(self.root)), ["c"])

  def test_an_index_leads_to_files_beside_it_alone(self):
    self._write("2.safetensors", "a")
    with self.assertRaisesRegex(ValueError, "2.safe.*: 'a' is in another"):
      tensor_files.read_tensors(self.root)
    self._write_index(a="7.safetensors")
    with self.assertRaisesRegex(FileNotFoundError, "7.safetensors: no such f"):
      tensor_files.read_tensors(self.root)
    self._write_index(a="/etc/../0.safetensors")
    self.assertEqual(list(tensor_files.read_tensors(self.root)), ["a"])
    self.index.write_text('{"weight_map": 3}')
    with self.assertRaisesRegex(ValueError, "index.json: .*weight_map"):
      tensor_files.read_tensors(self.root)


class WriteTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.path = self.root / "weights"

  @parameterized.parameters("float32", "bfloat16")
  def test_safetensors_reads_it(self, dtype):
    rng = np.random.default_rng(0)
    arrays = {
      "matrix": rng.normal(size=(5, 3)).astype(np.float32).T,
      "scalar": np.asarray(np.float32(1 + 3 * 2**-8)),  # bfloat16 rounds up
      "none": np.zeros((0, 3), np.float32),
    }
    metadata = {"format": "pt"}
    tensor_files.write_file(self.path, arrays.items(), dtype, metadata)
    read = safetensors.numpy.load_file(self.path)
    self.assertCountEqual(read, arrays)
    for name, array in arrays.items():
      want = array.astype(dtype)
      np.testing.assert_array_equal(read[name], want, strict=True)
    self.assertEqual(tensor_files.read_text(self.path), metadata)
    (other := self.root / "other").touch()
    self.assertEqual(self.path.stat().st_mode, other.stat().st_mode)

  def test_failure_leaves_the_old_file(self):
    tensor_files.write_file(self.path, [("w", np.ones(2))], "float32", {})
    content = self.path.read_bytes()
    with self.assertRaisesRegex(FloatingPointError, "'w' holds NaN"):
      nan = [("w", np.full(2, np.nan))]
      tensor_files.write_file(self.path, nan, "float32", {})
    self.assertEqual(self.path.read_bytes(), content)
    self.assertEqual(list(self.root.iterdir()), [self.path])

  def test_shards_are_filled_in_order(self):
    sizes, shards = (10, 1, 9, 20, 1), {1: "a", 2: "bc", 3: "d", 4: "e"}
    arrays = {n: np.ones(size, np.float32) for n, size in zip("abcde", sizes)}
    with mock.patch.object(tensor_files, "SHARD_SIZE", 40):
      tensor_files.write_folder(self.root, arrays.items(), "float32", {})
    index = json.loads((self.root / f"{_MODEL}.index.json").read_text())
    self.assertEqual(index["metadata"], {"total_size": 4 * 41})
    places = {}
    for number, held in shards.items():
      file = f"model-0000{number}-of-00004.safetensors"
      self.assertCountEqual(tensor_files.read_tensors(self.root / file), held)
      places |= dict.fromkeys(held, file)
    self.assertEqual(index["weight_map"], places)
    self.assertLen(list(self.root.iterdir()), 5)

  def test_new_folder_appears_at_the_end_or_not_at_all(self):
    with self.assertRaises(KeyError):
      with tensor_files.new_folder(self.path) as folder:
        (folder / "a").write_text("1")
        raise KeyError
    self.assertEmpty(list(self.root.iterdir()))
    target, link = self.root / "empty", self.root / "link"
    target.mkdir()
    link.symlink_to(target)
    with tensor_files.new_folder(link) as folder:
      (folder / "b").write_text("2")
    self.assertEqual((target / "b").read_text(), "2")
    with self.assertRaisesRegex(ValueError, "empty is no new or empty folder"):
      with tensor_files.new_folder(target):
        self.fail("entered")
