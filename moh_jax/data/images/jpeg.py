"""JPEG files through simplejpeg, which decodes faster than Pillow.

Both call libjpeg-turbo in the same way, so their pixels are equal bit for bit,
at every scale (tests/data/images/jpeg_test.py). What simplejpeg cannot read, or
only with a warning, is left to Pillow, so errors are Pillow's too.
"""

import functools
import importlib
from typing import Any

import numpy as np

_START = b"\xff\xd8\xff"
_SCAN = b"\xda"  # marker after which come pixels
# Where these stand before the pixels, the file may ask to be turned.
_ORIENTATIONS = (b"Exif\x00", b"tiff:Orientation")
_SPACES = {1: {"Gray": "GRAY"}, 3: {"Gray": "RGB", "YCbCr": "RGB"}}


def is_jpeg(content: bytes) -> bool:
  """Whether the bytes of a file begin as JPEG."""
  return content.startswith(_START)


def upright_size(content: bytes) -> tuple[int, int] | None:
  """Rows and columns, or None where Pillow has to tell."""
  header = _header(content)
  return None if header is None else header[:2]


def decode(
  content: bytes, channels: int, factor: int, most_pixels: int
) -> np.ndarray | None:
  """Decodes a JPEG file.

  Args:
    content: bytes of the file.
    channels: 1 for grey, 3 for RGB.
    factor: 1, 2, 4 or 8; divides rows and columns (rounded up).
    most_pixels: of the whole image; larger ones are not decoded.

  Returns:
    [X, Y, channels] uint8, or None where Pillow has to decode: simplejpeg is
    not installed, the file is damaged, may have to be turned, or has colours
    that are converted.
  """
  header = _header(content)
  if header is None or header[0] * header[1] > most_pixels:
    return None
  space = _SPACES[channels].get(header[2])
  if space is None:
    return None
  try:
    return _library().decode_jpeg(
      content,
      space,
      min_height=-(-header[0] // factor),
      min_width=-(-header[1] // factor),
    )
  except ValueError:
    return None


def _header(content: bytes) -> tuple[int, int, str] | None:
  """Rows, columns and colours of a file that simplejpeg reads as it stands."""
  if _library() is None or not is_jpeg(content):
    return None
  notes = content[: _pixels_at(content)]
  if any(mark in notes for mark in _ORIENTATIONS):
    return None
  try:
    return _library().decode_jpeg_header(content)[:3]
  except ValueError:
    return None


def _pixels_at(content: bytes) -> int:
  """Where the pixels begin; the length of the file where it is damaged."""
  place = 2
  while content[place : place + 1] == b"\xff":
    if content[place + 1 : place + 2] == _SCAN:
      return place
    place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
  return len(content)


@functools.cache
def _library() -> Any:
  try:
    return importlib.import_module("simplejpeg")
  except ModuleNotFoundError:
    return None
