"""Arrays in npz files."""

import io
import zipfile

import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.evaluation import fid, image_metrics
from moh_jax.runtime import files
from tests.fuzz import hostile


def _npz(**arrays) -> bytes:
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)
  return file.getvalue()


_IMAGES = np.zeros((3, 4, 4, 3), np.uint8)
_CONTENT = _npz(arr_0=_IMAGES, mu=np.zeros(4), sigma=np.zeros((4, 4)))
_HEADERS = st.fixed_dictionaries(
  {
    "descr": st.sampled_from(("|u1", "<f8", "|O", "<U9", "|V0", "x", 3, [])),
    "fortran_order": st.sampled_from((True, False, 0, "x")),
    "shape": st.one_of(
      st.lists(st.integers(-2, 2**40), max_size=5).map(tuple),
      st.sampled_from((3, "x", (2**62, 4), (1.0,), (True,), None)),
    ),
  }
)


class ArraysTest(hostile.ReaderTest):
  def _read(self, content: bytes):
    file = self.folder / "x.npz"
    file.write_bytes(content)
    self.check(files.read_npz, file)
    self.check(self._read_images, file)
    self.check(fid.read_statistics, file, 4, 4)

  def _read_images(self, file):
    for batch in image_metrics.open_images(file).batches(2):
      self.assertEqual(batch.dtype, np.uint8)

  @hostile.examples()
  @given(st.data())
  def test_damaged_file(self, data):
    self._read(data.draw(hostile.damaged(_CONTENT)))

  @hostile.examples()
  @given(_HEADERS, st.binary(max_size=64))
  def test_header_that_lies(self, header, content):
    text = (repr(header) + "\n").encode("latin1")
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
      archive.writestr("arr_0.npy", head + content)
    self._read(file.getvalue())


if __name__ == "__main__":
  absltest.main()
