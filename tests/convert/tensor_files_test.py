"""Safetensors: mapped, in shards, and written tensor by tensor."""

import json
import pathlib
import pickle
import sys
import zipfile
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized

from moh_jax.convert import tensor_files
from moh_jax.convert.tensor_files import Planned
from tests.convert.stored import save_tensors


class _Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "weights"

  def assert_rejected(self, found, path=None, error=ValueError):
    """The file and what was found are named, in one line."""
    path = path or self.path
    with self.assertRaisesRegex(error, rf"{path}: [^\n]*{found}[^\n]*\Z"):
      tensor_files.open_tensors(path)


class ReadTest(_Case):
  @parameterized.parameters(
    *("float64", "float32", "float16", "complex64", "bool", "uint8", "int8"),
    *("uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ">f4"),
  )
  def test_values_shapes_and_dtypes_are_those_stored(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    tensors = {"view": values.T[::2], "scalar": values[1, 1]}
    tensors["none"] = values[:0]
    save_tensors(self.path, tensors, {"step": "7"})
    self.assertEqual(tensor_files.read_text(self.path), {"step": "7"})
    for read in (tensor_files.read_tensors, tensor_files.open_tensors):
      found = read(self.path)
      self.assertEqual(found.keys(), tensors.keys())
      for name, value in tensors.items():
        stored = found[name]
        own = value.dtype.newbyteorder("=")
        self.assertEqual((stored.shape, stored.dtype), (value.shape, own))
        np.testing.assert_array_equal(np.asarray(stored), value.astype(own))

  def test_values_are_read_when_they_are_used(self):
    save_tensors(self.path, {"w": np.zeros(3)})
    array = np.asarray(tensor_files.open_tensors(self.path)["w"])
    self.assertIsInstance(array.base, np.memmap)
    self.assertFalse(array.flags.writeable)
    content = self.path.read_bytes()
    with self.path.open("r+b") as file:
      file.seek(len(content) - 8)
      file.write(np.float64(5).tobytes())
    self.assertEqual(array[2], 5)

  @parameterized.parameters(
    ("_orig_mod.{}", "_orig_mod.{}"),
    ("module._orig_mod.{}", "module._orig_mod.{}"),
    ("_orig_mod.module.{}", "_orig_mod.module.{}"),
    ("_orig_mod.{}", "{}"),
    ("module.{}", "module.blocks.0._orig_mod.{}", "blocks.0.b"),
  )
  def test_prefixes_of_wrapped_modules_are_left_out(self, a, b, name="b"):
    save_tensors(self.path, {a.format("a"): np.ones(1), b.format("b"): [2.0]})
    read = tensor_files.read_tensors(self.path)
    self.assertEqual({n: x.item() for n, x in read.items()}, {"a": 1, name: 2})

  def test_header_that_starts_like_a_pickle_and_an_unknown_dtype(self):
    for dtype in ("F32", "F4"):
      entry = {"dtype": dtype, "shape": [32 // int(dtype[1:])]}
      header = json.dumps({"w": {**entry, "data_offsets": [0, 4]}})
      size = (0x0280).to_bytes(8, "little")
      self.assertEqual(size[:2], b"\x80\x02")
      content = header.encode().ljust(0x0280) + np.float32(7).tobytes()
      self.path.write_bytes(size + content)
      if dtype == "F32":
        self.assertEqual(tensor_files.read_tensors(self.path)["w"], 7)
    self.assert_rejected("'w' has dtype F4; expected one of")

  @parameterized.parameters(
    (b"", "an empty file"),
    (b"<!DOCTYPE html>\n<html>", "an HTML"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    (pickle.dumps({"w": 1}, 2), "a bare pickle .legacy torch.save"),
    (b"\x93NUMPY\x01\x00", "unknown content"),
    (b"\x10\0\0\0\0\0\0\0{", "a damaged safetensors file"),
    (safetensors.numpy.save({"w": np.zeros(99)})[:-1], "a damaged safetensors"),
  )
  def test_says_what_it_found(self, content, found):
    self.path.write_bytes(content)
    self.assert_rejected(f"found {found}.*; expected a safetensors file")

  def test_nothing_there(self):
    self.assert_rejected("no such file", error=FileNotFoundError)
    self.path.mkdir()
    self.assert_rejected("0 shards", error=FileNotFoundError)

  def test_torch_files_name_the_extra_where_torch_is_missing(self):
    with zipfile.ZipFile(self.path, "w") as archive:
      archive.writestr("net/data.pkl", b"")
    with mock.patch.dict(sys.modules, {"torch": None}):
      self.assert_rejected(r"pip install 'moh_jax\[torch\]'")


class ShardsTest(_Case):
  def setUp(self):
    super().setUp()
    self.path.mkdir()
    self.index = self.path / "model.safetensors.index.json"
    for index, name in enumerate("ab"):
      self._write(f"{index}.safetensors", name)

  def _write(self, file, name):
    tensors = {f"module.{name}": np.full(2, ord(name))}
    save_tensors(self.path / file, tensors)

  def _write_index(self, **weight_map):
    weight_map = {f"module.{k}": v for k, v in weight_map.items()}
    self.index.write_text(json.dumps({"weight_map": weight_map}))

  def _check(self, path):
    read = tensor_files.read_tensors(path)
    self.assertEqual(sorted(read), ["a", "b"])
    np.testing.assert_array_equal(read["b"], [98, 98])

  def test_reads_a_directory_and_only_what_an_index_lists(self):
    self._check(self.path)
    self._write("extra.safetensors", "c")
    self._write_index(a="0.safetensors", b="1.safetensors")
    self._check(self.index)
    self._check(self.path)
    self._write("model.safetensors", "a")
    self._write_index(a="model.safetensors", b="1.safetensors")
    self._check(self.path)
    self._write_index(a="0.safetensors", b="1.safetensors")
    with self.assertRaisesRegex(ValueError, "model.safetensors and model.saf"):
      tensor_files.read_tensors(self.path)
    self._check(self.index)

  @parameterized.parameters(
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "model.fp16.safetensors",
    "a.safetensors",
    "pytorch_model.bin",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
  )
  def test_model_safetensors_is_read_whatever_lies_beside_it(self, other):
    self._write("model.safetensors", "c")
    self._write(other, "c")
    self.assertEqual(list(tensor_files.read_tensors(self.path)), ["c"])

  def test_the_models_index_is_read_whatever_lies_beside_it(self):
    self._write("consolidated.safetensors", "a")
    self._write("adapter_model.safetensors", "c")
    self._write_index(a="0.safetensors", b="1.safetensors")
    other = self.path / "consolidated.safetensors.index.json"
    other.write_text(self.index.read_text())
    self._check(self.path)

  def test_a_name_in_another_file_than_the_index_says(self):
    self._write_index(a="1.safetensors", b="0.safetensors")
    with self.assertRaisesRegex(ValueError, "'module.a' is in 0.*not in 1.saf"):
      tensor_files.read_tensors(self.path)

  def test_a_name_in_two_files(self):
    self._write("2.safetensors", "a")
    file = self.path / "2.safetensors"
    with self.assertRaisesRegex(ValueError, f"{file}: 'module.a' is in anot"):
      tensor_files.read_tensors(self.path)

  @parameterized.parameters(
    ("7.safetensors", FileNotFoundError, "7.safetensors: no such file"),
    ("0.safetensors", ValueError, "no shard holds 'module.z'"),
    *((shard, ValueError, "no shard index")
      for shard in ("../0.safetensors", "/etc/passwd", 3)),
    *((text, ValueError, "no shard index")
      for text in ("{", "{}", '{"weight_map": 3}', '{"weight_map": {}}')),
  )  # fmt: skip
  def test_bad_entries_of_an_index(self, shard, error, regex):
    if str(shard).startswith("{"):
      self.index.write_text(shard)
    else:
      self._write_index(a="0.safetensors", z=shard)
    with self.assertRaisesRegex(error, regex):
      tensor_files.read_tensors(self.path)


def _planned(**arrays):
  return [
    Planned((name,), (array.shape,), lambda array=array: [array])
    for name, array in arrays.items()
  ]


class WriteTest(_Case):
  def _write(self, dtype="float32", **arrays):
    tensor_files.write_file(
      self.path, _planned(**arrays), dtype, {"format": "pt"}
    )

  @parameterized.parameters(
    ("float32", 1), ("bfloat16", 24), ("float32", 2**25)
  )
  def test_safetensors_reads_it(self, dtype, rows):
    rng = np.random.default_rng(0)
    arrays = {
      "matrix": rng.normal(size=(5, 3)).astype(np.float32).T,
      "scalar": np.asarray(np.float32(1 + 3 * 2**-8)),  # bfloat16 rounds up
      "none": np.zeros((0, 3), np.float32),
      "stack": rng.normal(size=(2, 3, 4)).astype(np.float32),
    }
    with mock.patch.object(tensor_files, "_ROWS_BYTES", rows):
      self._write(dtype, **arrays)
    read = safetensors.numpy.load_file(self.path)
    self.assertCountEqual(read, arrays)
    for name, array in arrays.items():
      want = array.astype(dtype)
      np.testing.assert_array_equal(read[name], want, strict=True)
    with safetensors.safe_open(self.path, "numpy") as file:
      self.assertEqual(file.metadata(), {"format": "pt"})
    size = int.from_bytes(self.path.read_bytes()[:8], "little")
    self.assertEqual(size % 8, 0)

  def test_failure_leaves_the_old_file(self):
    self._write(w=np.ones(2))
    content = self.path.read_bytes()
    failing = mock.Mock(side_effect=OSError("disk"))
    planned = [*_planned(v=np.ones(3)), Planned(("w",), ((2,),), failing)]
    with self.assertRaisesRegex(OSError, "disk"):
      tensor_files.write_file(self.path, planned, "float32", {})
    self.assertEqual(self.path.read_bytes(), content)
    self.assertEqual(list(self.path.parent.iterdir()), [self.path])

  @parameterized.parameters(
    (100, (10, 15), [[0, 1]]),
    (40, (10, 1, 9, 20, 1), [[0], [1, 2], [3], [4]]),
  )
  def test_shards_are_filled_in_order(self, limit, sizes, shards):
    self.path.mkdir()
    arrays = {f"t{i}": np.full(n, i, np.float32) for i, n in enumerate(sizes)}
    tensor_files.write_folder(
      self.path, _planned(**arrays), "float32", {}, limit
    )
    count, index = len(shards), self.path / "model.safetensors.index.json"
    names = [f"model-0000{i + 1}-of-0000{count}" for i in range(count)]
    files = [f"{name if count > 1 else 'model'}.safetensors" for name in names]
    held = [[f"t{i}" for i in shard] for shard in shards]
    if count > 1:
      place = {t: file for file, own in zip(files, held) for t in own}
      expected = {"metadata": {"total_size": 4 * sum(sizes)}}
      found = json.loads(index.read_text())
      self.assertEqual(found, expected | {"weight_map": place})
      index.unlink()
    self.assertCountEqual(files, [path.name for path in self.path.iterdir()])
    for file, own in zip(files, held):
      read = safetensors.numpy.load_file(self.path / file)
      self.assertCountEqual(read, own)

  def test_new_folder_appears_at_the_end_or_not_at_all(self):
    for error in (KeyError, None):
      try:
        with tensor_files.new_folder(self.path) as folder:
          (folder / "a").write_text("1")
          self.assertFalse(self.path.exists())
          if error:
            raise error
      except KeyError:
        self.assertEmpty(list(self.path.parent.iterdir()))
    self.assertEqual((self.path / "a").read_text(), "1")
    self.assertLen(list(self.path.parent.iterdir()), 1)
    target, link = self.path.parent / "empty", self.path.parent / "link"
    target.mkdir()
    link.symlink_to(target)
    with tensor_files.new_folder(link) as folder:
      (folder / "b").write_text("2")
    self.assertEqual((target / "b").read_text(), "2")
    with self.assertRaisesRegex(ValueError, "weights holds 'a'; choose a new"):
      with tensor_files.new_folder(self.path):
        self.fail("entered")
