"""What `torch.save` wrote is read as data; what it did not is refused."""

import argparse
import collections
import json
import os
import pathlib

import chex
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.convert import tensor_files
from tests.folders import FolderTest

pytestmark = pytest.mark.transformers

_DTYPES = {
  **{name: name for name in ("float64", "float32", "float16", "int64")},
  "bfloat16": ml_dtypes.bfloat16,
}


def setUpModule():
  global torch
  torch = pytest.importorskip("torch")


class _Call:
  """Pickles into a call of a function."""

  def __init__(self, function, *args):
    self.call = function, args

  def __reduce__(self):
    return self.call


class _Case(FolderTest):
  def setUp(self):
    super().setUp()
    self.path = self.root / "weights.pth"

  def read(self, tree, key=None):
    torch.save(tree, self.path)
    return tensor_files.read_tensors(self.path, key)

  def assert_rejected(self, found, key=None):
    with self.assertRaises(ValueError) as caught:
      tensor_files.read_tensors(self.path, key)
    message = str(caught.exception)
    self.assertRegex(message, rf"\A{self.path}: [^\n]*{found}[^\n]*\Z")
    self.assertNotIn("weights_only", message)  # torch advises to run the code


class ReadTest(_Case):
  @parameterized.parameters(*_DTYPES)
  def test_values_and_views_of_a_storage(self, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(_DTYPES[dtype])
    whole = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, dtype))
    views = (lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1, 2],
             lambda x: x[:0])  # fmt: skip
    read = self.read({str(i): view(whole) for i, view in enumerate(views)})
    for i, view in enumerate(views):
      np.testing.assert_array_equal(read[str(i)], view(values), strict=True)

  def test_files_of_torch_before_1_6(self):
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"a": torch.arange(3.0)}, self.path, **old)
    chex.assert_trees_all_equal(
      tensor_files.read_tensors(self.path), {"a": np.arange(3, dtype="f4")}
    )
    torch.save({"a": _Call(os.system, "true")}, self.path, **old)
    self.assert_rejected("torch does not read it as data")

  def test_folder_of_one_file_or_of_shards_with_an_index(self):
    one, two = torch.arange(3.0), torch.ones(2)
    torch.save({"model": {"a": one}, "epoch": 3}, self.path)
    self.assertEqual(list(tensor_files.read_tensors(self.root)), ["a"])
    self.path.unlink()
    files = {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-2-of-2.bin"}
    for (name, file), tensor in zip(files.items(), (one, two)):
      torch.save({name: tensor}, self.root / file)
    torch.save({"c": two}, self.root / "training_args.bin")
    index = self.root / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    for path in (index, self.root):
      read = tensor_files.read_tensors(path)
      chex.assert_trees_all_equal(read, {"a": one.numpy(), "b": two.numpy()})

  def test_weights_beside_whatever_a_training_saves(self):
    module = torch.nn.Linear(3, 2)
    read = self.read({
      "model": module.state_dict(),  # an OrderedDict with attributes
      "optimizer": torch.optim.AdamW(module.parameters()).state_dict(),
      "epoch": 3,
      "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("a")),
      "best": np.float64(0.5),
      "counts": collections.Counter("ab"),
    })  # fmt: skip
    for name, want in module.state_dict().items():
      np.testing.assert_array_equal(read.pop(name), want.numpy())
    self.assertEmpty(read)


class EntryTest(_Case):
  """Which entry holds the weights."""

  @parameterized.parameters(
    (("model", "ema", "state_dict"), None, "ema"),
    (("optimizer", "state_dict", "model"), None, "model"),
    (("ema", "model_ema"), "model_ema", "model_ema"),
  )
  def test_the_usual_ones_in_order_or_that_of_the_key(self, names, key, taken):
    tree = {name: {"w": torch.tensor(i)} for i, name in enumerate(names)}
    tree["none"] = None
    self.assertEqual(self.read(tree, key)["w"], names.index(taken))

  @parameterized.parameters(
    # Broken averages are no reason to take other weights.
    (lambda w: {"ema": {"w": w, "decay": 0.9}, "model": {"w": w}}, None,
     "its entry 'ema' is no dict of tensors"),
    (lambda w: {"net": {"a": 1}, "epoch": 3}, "missing", "'net', 'epoch'"),
  )  # fmt: skip
  def test_what_holds_no_weights_is_named(self, tree, key, found):
    torch.save(tree(torch.ones(1)), self.path)
    self.assert_rejected(found, key)


class CodeTest(_Case):
  def test_runs_no_pickled_code(self):
    marker = self.root / "ran"
    attack = _Call(os.system, f"touch '{marker}'")
    for tree in ({"w": attack}, {"model": {"w": torch.ones(1)}, "x": attack}):
      torch.save(tree, self.path)
      self.assert_rejected("posix.system whose module posix is blocked")
    torch.load(self.path, weights_only=False)
    self.assertTrue(marker.exists(), "the attack works on a plain unpickler")

  def test_calls_of_unknown_functions_do_nothing(self):
    name = self.root / "ran"
    tree = {"model": {"w": torch.ones(6)}, "x": _Call(open, str(name), "w")}
    self.assertEqual(list(self.read(tree)), ["w"])
    self.assertFalse(name.exists())

  def test_damaged_files_are_named(self):
    torch.save({"w": torch.ones(99)}, self.path)
    content = self.path.read_bytes()
    self.path.write_bytes(content[: len(content) // 2])
    self.assert_rejected("or it is damaged")
