"""Files of tensors: safetensors, indexes of shards, torch archives."""

import importlib.util
import json
import unittest
import zipfile

import numpy as np
import safetensors.numpy
from absl.testing import absltest
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.convert import tensor_files
from tests.fuzz import hostile

_TENSORS = {"a.weight": np.ones((3, 2), np.float32), "b": np.arange(4)}


_has_torch = unittest.skipUnless(
  importlib.util.find_spec("torch"), "needs the extra torch"
)


def _header(header: dict, data: bytes) -> bytes:
  text = json.dumps(header).encode("utf-8", "surrogatepass")
  return len(text).to_bytes(8, "little") + text + data


class TensorsTest(hostile.ReaderTest):
  @classmethod
  def setUpClass(cls):
    if importlib.util.find_spec("torch"):
      import torch  # first: its memory is no example's
    super().setUpClass()
    file = cls.folder / "x"
    safetensors.numpy.save_file(_TENSORS, file, {"moh_jax": "{}"})
    cls.safetensors = file.read_bytes()
    size = int.from_bytes(cls.safetensors[:8], "little")
    cls.header = json.loads(cls.safetensors[8 : 8 + size])
    cls.data = cls.safetensors[8 + size :]
    if importlib.util.find_spec("torch"):
      whole = torch.zeros(2, 3)
      torch.save({"model": {"a": whole, "b": whole[0, 1:]}}, file)
      cls.archive = file.read_bytes()
      with zipfile.ZipFile(file) as archive:
        cls.pickle = archive.read("x/data.pkl")

  def _read(self, content: bytes, name: str):
    file = self.folder / name
    file.write_bytes(content)
    self.check(tensor_files.read_tensors, file)
    self.check(tensor_files.read_text, file)

  @hostile.examples()
  @given(st.data())
  def test_safetensors(self, data):
    content = data.draw(hostile.damaged(self.safetensors))
    self._read(content, "x.safetensors")

  @hostile.examples()
  @given(st.data())
  def test_header_of_safetensors(self, data):
    header = data.draw(hostile.altered(self.header))
    self._read(_header(header, self.data), "x.safetensors")

  @hostile.examples()
  @given(st.data())
  def test_index_of_shards(self, data):
    index = {"weight_map": {"a.weight": "x.safetensors", "b": "y.safetensors"}}
    (self.folder / "x.safetensors").write_bytes(self.safetensors)
    content = data.draw(hostile.json_files(index))
    self._read(content, "m.safetensors.index.json")

  @_has_torch
  @hostile.examples()
  @given(st.data())
  def test_torch_archive(self, data):
    self._read(data.draw(hostile.damaged(self.archive)), "x.pth")

  @_has_torch
  @hostile.examples()
  @given(st.data())
  def test_pickle_of_an_archive(self, data):
    content = data.draw(hostile.damaged(self.pickle))
    file = self.folder / "x.pth"
    with zipfile.ZipFile(file, "w") as archive:
      archive.writestr("net/data.pkl", content)
      archive.writestr("net/version", b"3")
      archive.writestr("net/data/0", bytes(24))
    self.check(tensor_files.read_tensors, file)

  @_has_torch
  def test_archive_that_unpacks_to_gigabytes(self):
    file = self.folder / "bomb.pth"
    zeros = bytes(1 << 26)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
      archive.writestr("net/data.pkl", self.pickle)
      for key in range(4):
        archive.writestr(f"net/data/{key}", zeros)
    with self.assertRaisesRegex(ValueError, "bomb.pth.*unpacks to"):
      tensor_files.read_tensors(file)


if __name__ == "__main__":
  absltest.main()
