"""JPEG files: headers, and decoding of a part.

They go through simplejpeg where that is installed, which decodes faster than
Pillow. Both call libjpeg-turbo in the same way, so their pixels are equal bit
for bit, at every scale (tests/data/decode_test.py). What simplejpeg cannot
read, or only with a warning, is left to Pillow, so errors are Pillow's too.

Most of the time of decoding goes into unpacking the bits of one row after the
other. No row can be skipped, but decoding can end early.
"""

import functools
import importlib
import re
from typing import Any

import numpy as np

from moh_jax.data.decoding_memory import DECODING_MEMORY, MOST_PIXELS

START = b"\xff\xd8\xff"
_END = b"\xff\xd9"
_MARKER = 0xFF
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # among pixels
_SCAN = 0xDA  # after which come pixels
_MOST_SCANS = 64  # each passes over all pixels; encoders write about ten
# Markers of the size of an image whose pixels come row by row, not in passes.
_SIZES = (0xC0, 0xC1)
_SPARE_ROWS = 2  # below a row, from which its colours are interpolated
# Where these stand before the pixels, the file may ask to be turned.
_ORIENTATIONS = (b"Exif\x00", b"tiff:Orientation")
_SPACES = {1: {"Gray": "GRAY"}, 3: {"Gray": "RGB", "YCbCr": "RGB"}}
_BYTES = 10  # a pixel, that decoding takes
_OF_PASSES = 6  # bytes a pixel of the file, at any scale, that comes in passes


def check_scans(content: bytes) -> None:
  """Refuses a JPEG file that passes over its pixels too often."""
  if not content.startswith(START):
    return
  size, place = _places(content)
  scans = 0
  while not size and (found := _NEXT_MARKER.search(content, place)):
    marker, place = content[found.start() + 1], found.end()
    scans += marker == _SCAN
    if scans > _MOST_SCANS:
      raise ValueError(f"more than {_MOST_SCANS} passes over its pixels")
    if marker == _END[1]:
      return
    place += int.from_bytes(content[place : place + 2])


def read_header(content: bytes) -> tuple[int, int, str, int] | None:
  """The header of a JPEG file, or None where Pillow has to read it.

  Returns:
    Rows, columns, the space of the colours as simplejpeg names it, and where
    the rows stand in the file: 0 if pixels come in passes.
  """
  if _simplejpeg() is None or not content.startswith(START):
    return None
  size, pixels = _places(content)
  notes = content[:pixels]
  if any(mark in notes for mark in _ORIENTATIONS):
    return None
  try:
    return *_simplejpeg().decode_jpeg_header(content)[:3], size
  except ValueError:
    return None


def decode(
  content: bytes,
  channels: int,
  factor: int = 1,
  rows: int | None = None,
  *,
  fast: bool = False,
) -> np.ndarray | None:
  """Decodes a JPEG file, or its upper rows, as `decode.decode_image` describes.

  Returns:
    [X, Y, channels] uint8, or None where Pillow has to decode: simplejpeg is
    not installed, the file is damaged, may have to be turned, or has colours
    that are converted.
  """
  height, width, colours, place = read_header(content) or (0, 0, "", 0)
  space = _SPACES[channels].get(colours)
  if not space or height * width > MOST_PIXELS:
    return None
  decoded = min((rows or height) + _SPARE_ROWS * factor, height)
  shortened = None
  # Truncation of a file could go unnoticed.
  if decoded < height and place and content.endswith(_END):
    # The same file with a header that states fewer rows: decoders end there.
    shortened = bytearray(content)
    shortened[place : place + 2] = decoded.to_bytes(2, "big")
  else:
    rows = decoded = height
  low, narrow = -(-decoded // factor), -(-width // factor)
  in_passes = 0 if place else height * width * _OF_PASSES
  try:
    with DECODING_MEMORY.reserved(max(low * narrow * _BYTES, in_passes)):
      pixels = _simplejpeg().decode_jpeg(
        shortened or content,
        space,
        min_height=low,
        min_width=narrow,
        fastupsample=fast,
        # A warning says that the rows left out are still in the file.
        strict=shortened is None,
      )
  except ValueError:
    return None
  return pixels[: -(-rows // factor)]


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
def _simplejpeg() -> Any:
  try:
    return importlib.import_module("simplejpeg")
  except ModuleNotFoundError:
    return None
