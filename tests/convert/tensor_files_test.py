import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.convert import tensor_files
from tests.convert import torch_archive
from tests.convert.stored import save_tensors


class KeyTest(torch_archive.TensorFilesTestCase):
  def save(self, **nests):
    """Saves dicts whose one tensor holds the dict's position."""
    tree, records = {}, {}
    for index, (name, entry) in enumerate(nests.items()):
      records[str(index)] = np.float32(index).tobytes()
      tensor = torch_archive.tensor(str(index), (), (), size=1)
      tree[name] = tensor if entry is None else {entry: tensor}
    torch_archive.save_archive(self.path, tree, records)

  @parameterized.parameters(
    (("model", "ema", "state_dict"), None, 1),
    (("optimizer", "state_dict", "model"), None, 2),
    (("optimizer", "state_dict"), None, 1),
    (("ema", "model_ema"), "model_ema", 1),
  )
  def test_picks_the_nested_weights(self, names, key, position):
    self.save(**dict.fromkeys(names, "w"))
    read = tensor_files.read_tensors(self.path, key)
    self.assertEqual(read["w"], position)

  def test_skips_a_nest_that_is_no_dict_of_tensors(self):
    self.save(ema=None, model="w")
    self.assertEqual(tensor_files.read_tensors(self.path)["w"], 1)

  def test_several_candidates_are_said(self):
    self.save(model="w", ema="w")
    with self.assertLogs("moh_jax", "WARNING") as logs:
      tensor_files.read_tensors(self.path)
    self.assertIn("the weights of its entry 'ema' are taken", logs.output[0])
    with self.assertNoLogs("moh_jax", "WARNING"):
      tensor_files.read_tensors(self.path, "model")

  def test_broken_averages_are_no_reason_to_take_other_weights(self):
    tensor = torch_archive.tensor("0", (), (), size=1)
    tree = {"ema": {"w": tensor, "decay": 0.9}, "model": {"w": tensor}}
    record = {"0": np.float32(1).tobytes()}
    torch_archive.save_archive(self.path, tree, record)
    self.assert_rejected("ema: entry 'decay' is not a dense tensor")
    self.assertEqual(tensor_files.read_tensors(self.path, "model")["w"], 1)

  def test_falls_back_to_the_top_level(self):
    self.save(weight=None, bias=None)
    read = tensor_files.read_tensors(self.path)
    self.assertEqual(list(read), ["weight", "bias"])

  @parameterized.parameters(None, "net", "missing")
  def test_lists_the_keys_where_none_fits(self, key):
    torch_archive.save_archive(self.path, {"net": {"a": 1}, "epoch": 3}, {})
    self.assert_rejected("'net'", "'epoch'", repr(key), key=key)

  def test_strips_the_prefix_that_all_names_share(self):
    self.save(model="module.head.weight")
    read = tensor_files.read_tensors(self.path)
    self.assertEqual(list(read), ["head.weight"])

  def test_keeps_a_prefix_that_some_names_lack(self):
    self.save(**{"module.weight": None, "bias": None})
    read = tensor_files.read_tensors(self.path)
    self.assertEqual(list(read), ["module.weight", "bias"])


class SafetensorsTest(torch_archive.TensorFilesTestCase):
  @parameterized.parameters(
    *("float64", "float32", "float16", "complex64", "bool", "uint8", "int8"),
    *("uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *(ml_dtypes.bfloat16, ">f4"),
  )
  def test_round_trip_keeps_values(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    tensors = {
      "view": values.T[::2],
      "scalar": values[1, 1],
      "none": values[:0],
    }
    save_tensors(self.path, tensors)
    read = tensor_files.read_tensors(self.path)
    self.assertEqual(read.keys(), tensors.keys())
    for name, value in tensors.items():
      self.assertEqual(read[name].dtype, value.dtype.newbyteorder("="))
      np.testing.assert_array_equal(read[name], value, strict=dtype != ">f4")

  def test_header_that_starts_like_a_pickle(self):
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(header).encode().ljust(0x0280)
    size = len(header).to_bytes(8, "little")
    self.path.write_bytes(size + header + np.float32(7).tobytes())
    self.assertEqual(size[:2], b"\x80\x02")
    self.assertEqual(tensor_files.read_tensors(self.path)["w"], 7)


class OpenTest(torch_archive.TensorFilesTestCase):
  """`open_tensors` gives what `read_tensors` does, without reading."""

  @parameterized.parameters(
    *("float64", "float32", "float16", "complex64", "bool", "uint8", "int8"),
    *("uint16", "int16", "uint32", "int32", "uint64", "int64"),
    ml_dtypes.bfloat16,
  )
  def test_maps_what_reading_gives(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    tensors = {"whole": values, "scalar": values[1, 1], "none": values[:0]}
    save_tensors(self.path, tensors, {"step": "7"})
    opened = tensor_files.open_tensors(self.path)
    self.assertEqual(opened.keys(), tensors.keys())
    for name, value in tensors.items():
      self.assertEqual(opened[name].shape, value.shape)
      self.assertEqual(opened[name].size, value.size)
      self.assertEqual(opened[name].dtype, value.dtype)
      np.testing.assert_array_equal(np.asarray(opened[name]), value)
      wide = np.asarray(opened[name], np.complex128)
      np.testing.assert_array_equal(wide, value.astype(np.complex128))

  def test_values_are_read_when_they_are_used(self):
    save_tensors(self.path, {"w": np.zeros(3)})
    opened = tensor_files.open_tensors(self.path)["w"]
    array = np.asarray(opened)
    self.assertIsInstance(array.base, np.memmap)
    self.assertFalse(array.flags.writeable)
    content = self.path.read_bytes()
    with self.path.open("r+b") as file:
      file.seek(len(content) - 8)
      file.write(np.float64(5).tobytes())
    self.assertEqual(array[2], 5)

  def test_torch_files_are_read(self):
    tree = {"w": torch_archive.tensor("0", (2,), (1,), size=2)}
    torch_archive.save_archive(self.path, tree, {"0": np.float32([1, 2])})
    opened = tensor_files.open_tensors(self.path)["w"]
    np.testing.assert_array_equal(opened, [1, 2])

  def test_has_no_keys(self):
    save_tensors(self.path, {"w": np.zeros(3)})
    with self.assertRaisesRegex(ValueError, "no dict of tensors for key='ema'"):
      tensor_files.open_tensors(self.path, "ema")

  def test_unknown_dtype_is_named(self):
    header = {"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    header = json.dumps(header).encode()
    size = len(header).to_bytes(8, "little")
    self.path.write_bytes(size + header + b"0")
    with self.assertRaisesRegex(ValueError, "'w' has dtype F4; expected one"):
      tensor_files.open_tensors(self.path)

  @parameterized.parameters(0.3, 0.99)
  def test_truncated_file_is_named(self, share):
    save_tensors(self.path, {"w": np.zeros(99)})
    content = self.path.read_bytes()
    self.path.write_bytes(content[: int(len(content) * share)])
    with self.assertRaisesRegex(ValueError, "weights: found a damaged"):
      tensor_files.open_tensors(self.path)


class ShardsTest(torch_archive.TensorFilesTestCase):
  def setUp(self):
    super().setUp()
    self.path.mkdir()
    self.index = self.path / "model.safetensors.index.json"
    for index, name in enumerate("ab"):
      self.write(f"{index}.safetensors", name)

  def write(self, file, name):
    tensors = {f"module.{name}": np.full(2, ord(name))}
    save_tensors(self.path / file, tensors)

  def write_index(self, **weight_map):
    weight_map = {f"module.{k}": v for k, v in weight_map.items()}
    self.index.write_text(json.dumps({"weight_map": weight_map}))

  def check(self, path):
    for reader in (tensor_files.read_tensors, tensor_files.open_tensors):
      read = reader(path)
      self.assertEqual(sorted(read), ["a", "b"])
      np.testing.assert_array_equal(read["b"], [98, 98])

  def test_reads_a_directory(self):
    self.check(self.path)

  def test_reads_only_what_the_index_lists(self):
    self.write("extra.safetensors", "c")
    self.write_index(a="0.safetensors", b="1.safetensors")
    self.check(self.index)
    self.check(self.path)

  def test_index_may_list_torch_shards(self):
    torch_shard = {"module.b": torch_archive.tensor("0", (2,), (1,), size=2)}
    torch_archive.save_archive(
      self.path / "b.bin", torch_shard, {"0": np.float32([98, 98])}
    )
    self.write_index(a="0.safetensors", b="b.bin")
    self.check(self.index)

  def test_rejects_a_name_in_two_files(self):
    self.write("2.safetensors", "a")
    with self.assertRaisesRegex(ValueError, "2.safetensors: 'module.a' is in"):
      tensor_files.read_tensors(self.path)

  def test_rejects_a_missing_shard(self):
    self.write_index(a="0.safetensors", b="7.safetensors")
    with self.assertRaisesRegex(FileNotFoundError, "7.safetensors: no such"):
      tensor_files.read_tensors(self.path)

  def test_rejects_a_missing_tensor(self):
    self.write_index(a="0.safetensors", z="1.safetensors")
    with self.assertRaisesRegex(ValueError, "no shard holds 'module.z'"):
      tensor_files.read_tensors(self.path)

  @parameterized.parameters("../0.safetensors", "/etc/passwd", 3)
  def test_rejects_shards_outside_the_directory(self, shard):
    self.write_index(a=shard)
    self.assert_rejected("no shard index", path=self.index)

  @parameterized.parameters(
    "{", "{}", '{"weight_map": 3}', '{"weight_map": {}}'
  )
  def test_rejects_other_json(self, text):
    self.index.write_text(text)
    self.assert_rejected("no shard index", path=self.index)

  def test_rejects_several_indexes(self):
    self.write_index(a="0.safetensors")
    (self.path / "fp16.safetensors.index.json").write_text("{}")
    self.assert_rejected("2 indexes")


class OtherFilesTest(torch_archive.TensorFilesTestCase):
  @parameterized.parameters(
    (b"", "an empty file"),
    (b"<!DOCTYPE html>\n<html>", "an HTML"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    (pickle.dumps({"w": 1}, 2), "legacy torch.save"),
    (b"\x93NUMPY\x01\x00", "unknown content"),
    (b"\x10\0\0\0\0\0\0\0{", "damaged safetensors"),
    (b"PK\x03\x04", "truncated or damaged zip"),
  )
  def test_says_what_it_found(self, content, found):
    self.path.write_bytes(content)
    self.assert_rejected(found)

  def test_rejects_truncated_files(self):
    tensor = torch_archive.tensor("0", (6,), (1,))
    torch_archive.save_archive(
      self.path, {"w": tensor}, {"0": np.float32(range(6))}
    )
    content = self.path.read_bytes()
    self.path.write_bytes(content[: len(content) // 2])
    self.assert_rejected("damaged zip")
    self.path.unlink()
    save_tensors(self.path, {"w": np.zeros(9)})
    self.path.write_bytes(self.path.read_bytes()[:-1])
    self.assert_rejected("damaged safetensors")

  def test_rejects_a_damaged_record(self):
    torch_archive.save_archive(
      self.path,
      {"w": torch_archive.tensor("0", (6,), (1,))},
      {"0": b"abcdef" * 4},
    )
    content = self.path.read_bytes().replace(b"abcdef", b"abcdeX")
    self.path.write_bytes(content)
    self.assert_rejected("'w'", "CRC")

  @parameterized.parameters(b"", b"\x80\x02}", b"\x80\x02K\x01K\x02s.", b"\xff")
  def test_rejects_a_damaged_pickle(self, content):
    with zipfile.ZipFile(self.path, "w") as archive:
      archive.writestr("net/data.pkl", content)
    self.assert_rejected("damaged data.pkl")

  @parameterized.parameters(
    (("a.npy",), "0 data.pkl"),
    (("net/data.pkl", "net/constants.pkl"), "TorchScript"),
  )
  def test_rejects_other_zips(self, names, found):
    with zipfile.ZipFile(self.path, "w") as archive:
      for name in names:
        archive.writestr(name, b"")
    self.assert_rejected(found)

  def test_missing_file(self):
    self.assert_rejected("no such file", error=FileNotFoundError)

  def test_directory_without_safetensors(self):
    self.path.mkdir()
    self.assert_rejected("0 shards", error=FileNotFoundError)


if __name__ == "__main__":
  absltest.main()
