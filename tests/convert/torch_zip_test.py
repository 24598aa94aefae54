"""Reading what `torch.save` wrote, and refusing what it did not."""

import os
import pickle
import sys
import types
from unittest import mock

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.convert import tensor_files
from tests.convert import torch_archive


class _System:
  """Pickles into a call of `os.system`."""

  def __init__(self, command):
    self.command = command

  def __reduce__(self):
    return os.system, (self.command,)


class TorchZipTest(torch_archive.TensorFilesTestCase):
  values = np.arange(6, dtype=np.float32)

  def save(self, tree, **kwargs):
    torch_archive.save_archive(
      self.path, tree, {"0": self.values.tobytes()}, **kwargs
    )

  @parameterized.parameters(
    ("Float", "float32"),
    ("Double", "float64"),
    ("Half", "float16"),
    ("BFloat16", ml_dtypes.bfloat16),
    ("Long", "int64"),
    ("Int", "int32"),
    ("Short", "int16"),
    ("Char", "int8"),
    ("Byte", "uint8"),
    ("Bool", "bool"),
    ("ComplexFloat", "complex64"),
    ("ComplexDouble", "complex128"),
  )
  def test_reads_each_storage_type(self, kind, dtype):
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    for name, order in (("little", "<"), ("big", ">")):
      unit = values.itemsize // (2 if values.dtype.kind == "c" else 1)
      stored = values.view(f"u{unit}").astype(f"{order}u{unit}").tobytes()
      tensor = torch_archive.tensor(
        "0", (2, 3), (3, 1), kind=f"torch.{kind}Storage"
      )
      torch_archive.save_archive(
        self.path, {"w": tensor}, {"0": stored}, name.encode()
      )
      read = tensor_files.read_tensors(self.path)["w"]
      self.assertEqual(read.dtype, values.dtype)
      np.testing.assert_array_equal(read, values)

  @parameterized.parameters("uint16", "uint32", "uint64", "float8_e4m3fn")
  def test_reads_dtypes_without_a_storage_type(self, dtype):
    values = np.array([1, 2, 3]).astype(dtype)
    storage = torch_archive.storage(
      "0", "torch.storage.UntypedStorage", values.nbytes
    )
    args = (
      storage,
      1,
      (2,),
      (1,),
      False,
      None,
      torch_archive.find_global(f"torch.{dtype}"),
    )
    tensor = torch_archive.call("torch._utils._rebuild_tensor_v3", *args)
    torch_archive.save_archive(
      self.path, {"w": tensor}, {"0": values.tobytes()}
    )
    read = tensor_files.read_tensors(self.path)["w"]
    self.assertEqual(read.dtype, values.dtype)
    np.testing.assert_array_equal(read, values[1:])

  @parameterized.parameters(
    ((3, 2), (1, 3), 0, [[0, 3], [1, 4], [2, 5]]),  # transposed
    ((2,), (2,), 1, [1, 3]),  # every second
    ((2, 2), (0, 1), 4, [[4, 5], [4, 5]]),  # expanded
    ((1, 2), (2**62, 1), 4, [[4, 5]]),  # stride of an axis of length 1
    ((), (), 5, 5),
    ((0, 3), (3, 1), 6, np.zeros((0, 3))),
  )
  def test_reads_views_of_a_storage(self, shape, strides, offset, expected):
    self.save({"w": torch_archive.tensor("0", shape, strides, offset)})
    read = tensor_files.read_tensors(self.path)["w"]
    self.assertEqual(read.shape, shape)
    np.testing.assert_array_equal(read, np.float32(expected))

  def test_tied_weights_share_memory(self):
    self.save(
      {
        "a": torch_archive.tensor("0", (6,), (1,)),
        "b": torch_archive.tensor("0", (2,), (1,), 4),
      }
    )
    read = tensor_files.read_tensors(self.path)
    self.assertTrue(np.shares_memory(read["a"], read["b"]))

  @parameterized.parameters(
    "_rebuild_parameter", "_rebuild_parameter_with_state"
  )
  def test_reads_a_parameter_as_its_tensor(self, function):
    hooks = torch_archive.call("collections.OrderedDict")
    tensor = torch_archive.tensor("0", (6,), (1,))
    self.save(
      {"w": torch_archive.call(f"torch._utils.{function}", tensor, True, hooks)}
    )
    read = tensor_files.read_tensors(self.path)["w"]
    np.testing.assert_array_equal(read, self.values)

  @parameterized.parameters(
    ((7,), (1,), 0),
    ((2, 3), (4, 1), 0),
    ((1,), (1,), 6),
    ((2,), (1,), -1),
    ((2,), (-1,), 1),
    ((-2,), (1,), 0),
    ((2**70,), (2**70,), 0),
    ((2, 3), (1,), 0),
    ((2,), ("1",), 0),
    ((2,), None, 0),
  )
  def test_rejects_tensors_outside_their_storage(self, shape, strides, offset):
    self.save({"blocks.0.w": torch_archive.tensor("0", shape, strides, offset)})
    self.assert_rejected("'blocks.0.w'")

  @parameterized.parameters(
    ("0", 7, "24 bytes, not 28"), ("1", 6, "net/data/1")
  )
  def test_rejects_missing_storage(self, key, size, message):
    self.save({"w": torch_archive.tensor(key, (1,), (1,), size=size)})
    self.assert_rejected("'w'", message)

  def test_rejects_unknown_byte_order(self):
    self.save({"w": torch_archive.tensor("0", (6,), (1,))}, byteorder=b"middle")
    self.assert_rejected("middle", "little")

  def test_reads_weights_beside_objects_of_unknown_classes(self):
    metadata = {"_metadata": {"": {"version": 1}}}
    weights = torch_archive.call("collections.OrderedDict", state=metadata)
    name, weight = (
      torch_archive.code("w"),
      torch_archive.tensor("0", (6,), (1,)),
    )
    lost = torch_archive.tensor(
      "lost", (6,), (1,)
    )  # no record: must not be read
    self.save(
      {
        "model": torch_archive.Code(weights + b"(" + name + weight + b"u"),
        "optimizer": {"state": {0: {"exp_avg": lost}}, "lr": 0.1},
        "epoch": 3,
        "args": torch_archive.call("argparse.Namespace", state={"lr": 0.1}),
        "new": torch_archive.Code(
          torch_archive.find_global("a.B")
          + b")\x81"
          + torch_archive.code({"c": 1})
          + b"b"
        ),
        "list": torch_archive.Code(
          torch_archive.call("a.List") + b"(K\x01K\x02e"
        ),
        "dict": torch_archive.Code(
          torch_archive.call("a.Dict") + b"(K\x01K\x02u"
        ),
        "method": torch_archive.Code(
          torch_archive.call("builtins.getattr", "a", "b") + b")R"
        ),
        "device": torch_archive.call("torch.device", "cuda", 0),
      }
    )
    read = tensor_files.read_tensors(self.path)
    self.assertEqual(list(read), ["w"])
    np.testing.assert_array_equal(read["w"], self.values)

  def test_runs_no_pickled_code(self):
    marker = self.path.with_name("ran")
    attack = _System(f"touch '{marker}'")
    pickle.loads(pickle.dumps(attack))
    self.assertTrue(marker.exists(), "the attack works on a plain unpickler")
    marker.unlink()
    self.save(
      {"model": {"w": torch_archive.tensor("0", (6,), (1,))}, "args": attack}
    )
    self.assertEqual(list(tensor_files.read_tensors(self.path)), ["w"])
    self.save({"w": attack})
    self.assert_rejected("'w'")
    self.assertFalse(marker.exists())

  def test_pickle_cannot_change_the_reader(self):
    patch = (
      torch_archive.code((None, {"__defaults__": (), "__setstate__": 1})) + b"b"
    )
    tensor = torch_archive.tensor("0", (6,), (1,))
    names = ("torch._utils._rebuild_tensor_v2", "collections.OrderedDict")
    for name in (*names, "argparse.Namespace"):
      self.save(
        {
          "model": {"w": tensor},
          "x": torch_archive.Code(torch_archive.find_global(name) + patch),
        }
      )
      for _ in range(2):
        read = tensor_files.read_tensors(self.path)["w"]
        np.testing.assert_array_equal(read, self.values)

  def test_reads_what_torch_refuses(self):
    refusal = mock.Mock(side_effect=pickle.UnpicklingError("Namespace"))
    torch = types.SimpleNamespace(load=refusal)
    self.save({"w": torch_archive.tensor("0", (6,), (1,))})
    with mock.patch.dict(sys.modules, {"torch": torch}):
      read = tensor_files.read_tensors(self.path)["w"]
    np.testing.assert_array_equal(read, self.values)
    self.assertTrue(refusal.call_args.kwargs["weights_only"])


if __name__ == "__main__":
  absltest.main()
