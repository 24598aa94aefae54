"""Image files of several formats."""

import io
import struct
import zlib

import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from moh_jax.data import decode
from tests.fuzz import hostile

_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


def _image(kind: str) -> bytes:
  pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind)
  return file.getvalue()


def _png(columns: int, rows: int) -> bytes:
  """A PNG file whose header states any size."""

  def chunk(name: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + check

  head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
  body = chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
  return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body


class ImagesTest(hostile.ReaderTest, parameterized.TestCase):
  @hostile.examples(120)
  @given(st.sampled_from(_FORMATS), st.sampled_from((1, 3)), st.data())
  def test_damaged_file(self, kind, channels, data):
    content = data.draw(hostile.damaged(_image(kind)))
    self.check(decode.decode_image, content, channels, "x")

  @parameterized.parameters(
    (100_000, 100_000, "pixels"), (9_000, 9_000, "cannot hold")
  )
  def test_png_that_lies_about_its_size(self, columns, rows, text):
    with self.assertRaisesRegex(ValueError, f"liar.png.*{text}"):
      decode.decode_image(_png(columns, rows), 3, "liar.png")


if __name__ == "__main__":
  absltest.main()
