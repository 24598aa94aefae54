"""What `torch.save` wrote is read as data; what it did not is refused."""

import argparse
import collections
import json
import os
import pathlib
import zipfile

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.convert import tensor_files

pytestmark = pytest.mark.transformers

_DTYPES = {
  **{name: name for name in ("float64", "float32", "float16", "bool")},
  **{f"{s}int{b}": f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)},
  **{name: name for name in ("complex64", "complex128")},
  "bfloat16": ml_dtypes.bfloat16,
  "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def setUpModule():
  global torch
  torch = pytest.importorskip("torch")


class _Unknown:
  """A class of the program that saved; pickled by its state."""

  def __init__(self):
    self.values = [1, {"a": 2}]


class _Dict(dict):
  """A dict with attributes of its own."""

  def __init__(self, **items):
    super().__init__(items)
    self.frozen = True


class _List(list):
  pass


class _Call:
  """Pickles into a call of a function."""

  def __init__(self, function, *args):
    self.call = function, args

  def __reduce__(self):
    return self.call


class _Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "weights.pth"

  def read(self, tree, key=None):
    torch.save(tree, self.path)
    return tensor_files.read_tensors(self.path, key)

  def assert_rejected(self, found, key=None):
    with self.assertRaises(ValueError) as caught:
      tensor_files.read_tensors(self.path, key)
    message = str(caught.exception)
    self.assertRegex(message, rf"\A{self.path}: [^\n]*{found}[^\n]*\Z")
    self.assertNotIn("weights_only", message)  # torch advises to run the code
    self.assertLess(len(message), 500)


class ReadTest(_Case):
  @parameterized.parameters(*_DTYPES)
  def test_values_and_views_of_a_storage(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(_DTYPES[dtype])
    whole = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, dtype))
    read = self.read({
      "whole": whole, "turned": whole.T, "some": whole[:, ::2],
      "wide": whole[:, 1:2].expand(2, 4), "scalar": whole[1, 2],
      "none": whole[:0],
    })  # fmt: skip
    for name, want in {
      "whole": values, "turned": values.T, "some": values[:, ::2],
      "wide": values[:, [1] * 4], "scalar": values[1, 2], "none": values[:0],
    }.items():  # fmt: skip
      self.assertEqual((read[name].dtype, read[name].shape),
                       (values.dtype, want.shape))  # fmt: skip
      np.testing.assert_array_equal(read[name], want)

  def test_folder_of_one_file_or_of_shards_with_an_index(self):
    one, two = torch.arange(3.0), torch.ones(2)
    torch.save({"model": {"a": one}, "epoch": 3}, self.path)
    read = tensor_files.read_tensors(self.path.parent)
    np.testing.assert_array_equal(read.pop("a"), one.numpy())
    self.assertEmpty(read)
    self.path.unlink()
    files = {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-2-of-2.bin"}
    for (name, file), tensor in zip(files.items(), (one, two)):
      torch.save({name: tensor}, self.path.with_name(file))
    with self.assertRaisesRegex(ValueError, "2 files of torch.save"):
      tensor_files.read_tensors(self.path.parent)
    index = self.path.with_name("pytorch_model.bin.index.json")
    index.write_text(json.dumps({"weight_map": files}))
    read = tensor_files.read_tensors(self.path.parent)
    for name, tensor in (("a", one), ("b", two)):
      np.testing.assert_array_equal(read[name], tensor.numpy())

  @parameterized.parameters("training_args.bin", "adapter_model.safetensors")
  def test_pytorch_model_is_read_whatever_lies_beside_it(self, other):
    for name in ("pytorch_model.bin", other):
      torch.save({name: torch.ones(2)}, self.path.with_name(name))
    found = list(tensor_files.read_tensors(self.path.parent))
    self.assertEqual(found, ["pytorch_model.bin"])

  def test_tied_weights_share_memory(self):
    whole = torch.nn.Parameter(torch.arange(6.0))
    read = self.read({"a": whole, "b": whole.detach()[4:]})
    self.assertTrue(np.shares_memory(read["a"], read["b"]))

  def test_weights_beside_whatever_a_training_saves(self):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    read = self.read({
      "model": module.state_dict(),  # an OrderedDict with attributes
      "optimizer": optimizer.state_dict(),
      "epoch": 3,
      "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("a")),
      "best": np.float64(0.5),
      "history": np.arange(3),
      "own": [_Unknown(), _Unknown],
      "config": _Dict(a=_Dict(b=1)),  # as yacs has
      "last": [_List([1, 2]), collections.deque([1, 2], 3)],
      "device": torch.device("cuda", 0),
    })  # fmt: skip
    self.assertEqual(list(read), ["weight", "bias"])
    for name, want in module.state_dict().items():
      np.testing.assert_array_equal(read[name], want.numpy())

  def test_a_shard_of_an_index(self):
    torch.save({"w": torch.ones(2)}, self.path)
    index = self.path.with_name("pytorch_model.bin.index.json")
    index.write_text('{"weight_map": {"w": "weights.pth"}}')
    np.testing.assert_array_equal(tensor_files.open_tensors(index)["w"], [1, 1])


class EntryTest(_Case):
  """Which entry holds the weights."""

  @parameterized.parameters(
    (("model", "ema", "state_dict"), None, "ema"),
    (("optimizer", "state_dict", "model"), None, "model"),
    (("optimizer", "state_dict"), None, "state_dict"),
    (("ema", "model_ema"), "model_ema", "model_ema"),
  )
  def test_the_usual_ones_in_order_or_that_of_the_key(self, names, key, taken):
    tree = {name: {"w": torch.tensor(i)} for i, name in enumerate(names)}
    tree["none"] = None
    one = key is not None or len({*names} - {"optimizer"}) == 1
    with self.assertNoLogs("moh_jax") if one else self.assertLogs("moh_jax"):
      self.assertEqual(self.read(tree, key)["w"], names.index(taken))

  @parameterized.parameters(
    # Broken averages are no reason to take other weights.
    (lambda w: {"ema": {"w": w, "decay": 0.9}, "model": {"w": w}}, None,
     "ema: entry 'decay' is not a dense tensor"),
    (lambda w: {"w": w.to("meta")}, None,
     "tensor 'w' is .* on meta; expected a dense one of"),
    *((lambda w: {"net": {"a": 1}, "epoch": 3}, key,
       f"key={key!r} .*'net', 'epoch'") for key in (None, "net", "missing")),
  )  # fmt: skip
  def test_what_holds_no_weights_is_named(self, tree, key, found):
    torch.save(tree(torch.ones(1)), self.path)
    self.assert_rejected(found, key)

  @parameterized.parameters(
    (("weight", "bias"), ["weight", "bias"]),
    (("module.a.b", "module.c"), ["a.b", "c"]),
    (("module.a", "c"), ["module.a", "c"]),
  )
  def test_top_level_and_the_prefix_that_all_names_share(self, names, want):
    read = self.read({name: torch.ones(1) for name in names})
    self.assertEqual(list(read), want)


class HostileTest(_Case):
  def test_runs_no_pickled_code(self):
    marker = self.path.with_name("ran")
    attack = _Call(os.system, f"touch '{marker}'")
    for tree in ({"w": attack}, {"model": {"w": torch.ones(1)}, "x": attack}):
      torch.save(tree, self.path)
      self.assert_rejected("GLOBAL posix.system whose module posix is blocked")
    torch.load(self.path, weights_only=False)
    self.assertTrue(marker.exists(), "the attack works on a plain unpickler")

  def test_one_number_expanded_to_matrices_is_refused(self):
    torch.save({"a": torch.ones(1).expand(30_000, 30_000)}, self.path)
    self.assert_rejected("'a' have 3,600,000,000 bytes, must be at most 67,1")

  def test_calls_of_unknown_functions_do_nothing(self):
    name = self.path.with_name("ran")
    tree = {"model": {"w": torch.ones(6)}, "x": _Call(open, str(name), "w")}
    self.assertEqual(list(self.read(tree)), ["w"])
    self.assertFalse(name.exists())

  @parameterized.parameters(
    (lambda content: content[: len(content) // 2], "truncated or damaged zip"),
    (lambda content: b"PK\x03\x04", "truncated or damaged zip"),
    (lambda content: content.replace(b"abcd", b"abce"), "bad CRC"),
  )
  def test_damaged_zip(self, damage, found):
    torch.save({"w": torch.tensor(list(b"abcdefgh" * 9)).byte()}, self.path)
    self.path.write_bytes(damage(self.path.read_bytes()))
    self.assert_rejected(found)

  @parameterized.parameters(
    ({"a.npy": b""}, zipfile.ZIP_STORED, "does not read as data"),
    ({"n/data.pkl": b"", "n/version": b"3", "n/constants.pkl": b""},
     zipfile.ZIP_STORED, "torchscript"),
    ({"n/data.pkl": b"ab"}, zipfile.ZIP_DEFLATED, "records are compressed"),
    ({"n/data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED, "unpacks to"),
  )  # fmt: skip
  def test_other_zips(self, records, compression, found):
    with zipfile.ZipFile(self.path, "w", compression) as archive:
      for name, content in records.items():
        archive.writestr(name, content)
    self.assert_rejected(found)
