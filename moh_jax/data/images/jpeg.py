"""JPEG files through simplejpeg, which decodes faster than Pillow.

Both call libjpeg-turbo in the same way, so their pixels are equal bit for bit,
at every scale (tests/data/images/jpeg_test.py). What simplejpeg cannot read, or
only with a warning, is left to Pillow, so errors are Pillow's too.

Most of the time of decoding goes into unpacking the bits of one row after the
other. No row can be skipped, but decoding can end early.
"""

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

_START = b"\xff\xd8\xff"
_END = b"\xff\xd9"
_MARKER = 0xFF
_SCAN = 0xDA  # after which come pixels
# Markers of the size of an image whose pixels come row by row, not in passes.
_SIZES = (0xC0, 0xC1)
_SPARE_ROWS = 2  # below a row, from which its colours are interpolated
# Where these stand before the pixels, the file may ask to be turned.
_ORIENTATIONS = (b"Exif\x00", b"tiff:Orientation")
_SPACES = {1: {"Gray": "GRAY"}, 3: {"Gray": "RGB", "YCbCr": "RGB"}}


def is_jpeg(content: bytes) -> bool:
  """Whether the bytes of a file begin as JPEG."""
  return content.startswith(_START)


class Header(NamedTuple):
  """What a file says of itself that simplejpeg reads as it stands.

  Attributes:
    rows: of the image.
    columns: of the image.
    colours: as simplejpeg names their space.
    size_place: where `rows` stand in the file; 0 if pixels come in passes.
  """

  rows: int
  columns: int
  colours: str
  size_place: int


def read_header(content: bytes) -> Header | None:
  """The header of a file, or None where Pillow has to read it."""
  if _library() is None or not is_jpeg(content):
    return None
  size, pixels = _places(content)
  notes = content[:pixels]
  if any(mark in notes for mark in _ORIENTATIONS):
    return None
  try:
    return Header(*_library().decode_jpeg_header(content)[:3], size)
  except ValueError:
    return None


def decode(
  content: bytes,
  channels: int,
  factor: int,
  most_pixels: int,
  rows: int | None = None,
  *,
  fast: bool = False,
  header: Header | None = None,
) -> np.ndarray | None:
  """Decodes a JPEG file, or its upper rows.

  Args:
    content: bytes of the file.
    channels: 1 for grey, 3 for RGB.
    factor: 1, 2, 4 or 8; divides rows and columns (rounded up).
    most_pixels: of the whole image; larger ones are not decoded.
    rows: how many of the whole image are needed from the top; None is all. The
      result has more where decoding cannot end early.
    fast: repeats colours that a file holds for two or four pixels, where Pillow
      interpolates them.
    header: of `read_header`, where it is known.

  Returns:
    [X, Y, channels] uint8, or None where Pillow has to decode: simplejpeg is
    not installed, the file is damaged, may have to be turned, or has colours
    that are converted.
  """
  header = header or read_header(content)
  if header is None or header.rows * header.columns > most_pixels:
    return None
  space = _SPACES[channels].get(header.colours)
  if space is None:
    return None
  height, width = header.rows, header.columns
  decoded = min((rows or height) + _SPARE_ROWS * factor, height)
  shortened = None
  if decoded < height:
    shortened = _first_rows(content, header.size_place, decoded)
  if shortened is None:
    rows = decoded = height
  try:
    pixels = _library().decode_jpeg(
      shortened or content,
      space,
      min_height=-(-decoded // factor),
      min_width=-(-width // factor),
      fastupsample=fast,
      # A warning says that the rows left out are still in the file.
      strict=shortened is None,
    )
  except ValueError:
    return None
  return pixels[: -(-rows // factor)]


def _first_rows(content: bytes, place: int, rows: int) -> bytearray | None:
  """The same file with a header that states fewer rows: decoders end there.

  None where the pixels do not come row by row, or where the file is truncated,
  which could go unnoticed.
  """
  if not place or not content.endswith(_END):
    return None
  shortened = bytearray(content)
  shortened[place : place + 2] = rows.to_bytes(2, "big")
  return shortened


def _places(content: bytes) -> tuple[int, int]:
  """Where the number of rows of an image stands, and where its pixels begin.

  The first is 0 where pixels come in passes. The second is the length of the
  file where it is damaged.
  """
  place, size = 2, 0
  while place + 4 <= len(content) and content[place] == _MARKER:
    marker = content[place + 1]
    if marker == _SCAN:
      return size, place
    if marker in _SIZES:
      size = place + 5  # after the marker, a length and the number of bits
    place += 2 + (content[place + 2] << 8 | content[place + 3])
  return 0, len(content)


@functools.cache
def _library() -> Any:
  try:
    return importlib.import_module("simplejpeg")
  except ModuleNotFoundError:
    return None
