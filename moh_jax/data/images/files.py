"""Image files: decoding to pixels."""

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from typing import IO

import numpy as np
from etils import epath
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from moh_jax.data.images import jpeg
from moh_jax.files import DEFLATE_RATIO

# A larger image takes more than a gigabyte while it is decoded.
_MOST_PIXELS = 89_478_485
_MOST_BYTES = 1 << 28  # of an image file
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that swap rows and columns
_MODES = {1: "L", 3: "RGB"}
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")
# What Pillow multiplies the samples of grey PNG files of 2 and 4 bits by.
_SCALES = {"L;2": 85, "L;4": 17}


def read_image(file: str | os.PathLike, channels: int) -> np.ndarray:
  """Reads one image file in any format that Pillow knows.

  Args:
    file: path, local or in a bucket.
    channels: 1 converts to grey, 3 to RGB.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is not an image, or truncated.
  """
  return decode_image(read_bytes(file), channels, str(file))


def read_bytes(file: str | os.PathLike) -> bytes:
  """The content of an image file, local or in a bucket.

  Raises:
    FileNotFoundError: there is no such file, or it is a broken link.
    ValueError: it cannot be read, or is too large.
  """
  path = epath.Path(file)
  if not path.is_file():
    what = "a broken link" if os.path.islink(path) else "no such image file"
    raise FileNotFoundError(f"{path}: {what}")
  if (size := path.stat().length) > _MOST_BYTES:
    raise ValueError(f"{path}: {size:,} bytes, must be at most {_MOST_BYTES:,}")
  try:
    return path.read_bytes()
  except OSError as error:
    raise ValueError(f"{path}: cannot be read: {error}") from error


def decode_image(
  content: bytes,
  channels: int,
  name: str,
  factor: int = 1,
  rows: int | None = None,
  *,
  fast: bool = False,
  header: jpeg.Header | None = None,
) -> np.ndarray:
  """Decodes one image from the bytes of its file.

  JPEG files go through simplejpeg where that is installed, all others through
  Pillow; the pixels are the same.

  Args:
    content: bytes of a file in any format that Pillow knows.
    channels: 1 converts to grey, 3 to RGB.
    name: name of the image, for error messages.
    factor: 2, 4 or 8 decodes a JPEG file to so many times fewer rows and
      columns (rounded up), which takes less time; only for JPEG.
    rows: how many of the whole image are needed from the top; None is all. The
      result may have more.
    fast: does not interpolate the colours of a JPEG file that has fewer of them
      than pixels, which changes these by about a level on average. Only with
      simplejpeg.
    header: of `jpeg.read_header`, where it is known.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: the bytes are not an image, or truncated.
  """
  if channels in _MODES:
    pixels = jpeg.decode(
      content, channels, factor, _MOST_PIXELS, rows, fast=fast, header=header
    )
    if pixels is not None:
      return pixels
  with _named_errors(name), open_picture(io.BytesIO(content)) as image:
    _check_plausible(image, len(content))
    if factor > 1:
      image.draft(None, (image.width // factor, image.height // factor))
    return to_pixels(image, channels)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
  """Turns any error of reading an image into a ValueError that names it."""
  try:
    yield
  except UnidentifiedImageError as error:
    raise ValueError(f"{name}: not an image that Pillow can read") from error
  except Exception as error:  # a damaged image raises nearly anything
    raise ValueError(f"{name}: damaged or truncated image: {error}") from error


@contextlib.contextmanager
def open_picture(file: str | os.PathLike | IO[bytes]) -> Iterator[Image.Image]:
  """Opens an image whose size is in bounds; its pixels are not read yet.

  Raises:
    ValueError: it has more than `_MOST_PIXELS` pixels.
  """
  with warnings.catch_warnings():
    # Pillow warns of odd but readable files; unreadable ones raise.
    warnings.simplefilter("ignore")
    with Image.open(file) as image:
      if math.prod(image.size) > _MOST_PIXELS:
        columns, rows = image.size
        raise ValueError(
          f"{rows} rows x {columns} columns, must be at most {_MOST_PIXELS:,} "
          "pixels"
        )
      yield image


def _check_plausible(image: Image.Image, size: int) -> None:
  """Refuses a PNG file too short for the pixels that its header states."""
  bits = {"1": 1, "P": 1, "L;2": 2, "L;4": 4, "I;16": 16, "RGB": 24}
  bits = bits.get(_stored_mode(image), bits.get(image.mode, 8))
  least = math.prod(image.size) * bits // 8 // DEFLATE_RATIO
  if image.format == "PNG" and size < least:
    raise ValueError(
      f"{size:,} bytes cannot hold {image.size[1]} rows x {image.size[0]} "
      "columns"
    )


def describe_image(content: bytes, name: str) -> tuple[tuple[int, int], bool]:
  """What the header of an image file says; its pixels are not decoded.

  Args:
    content: bytes of a file in any format that Pillow knows.
    name: name of the image, for error messages.

  Returns:
    Rows and columns as a viewer shows them, and whether the image is grey.

  Raises:
    ValueError: the bytes are not an image.
  """
  with _named_errors(name), open_picture(io.BytesIO(content)) as image:
    grey = image.mode.partition(";")[0] in _GREY_MODES
    return picture_size(image), grey


def picture_size(image: Image.Image) -> tuple[int, int]:
  """Rows and columns of an opened image as a viewer shows it.

  Only of a PNG file that notes its orientation behind the pixels, which would
  have to be decoded for it, are they those of the header.
  """
  columns, rows = image.size
  unread = image.format == "PNG" and "exif" not in image.info
  if unread or image.format == "TIFF":  # whose size Pillow has turned
    return rows, columns
  turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _TURNED
  return (columns, rows) if turned else (rows, columns)


def to_pixels(image: Image.Image, channels: int) -> np.ndarray:
  """The pixels of an image of any mode, as a viewer shows them.

  The camera's orientation (EXIF) is applied, what is transparent becomes white,
  and of an animation the first frame is taken. 16 bits become 8.

  Args:
    image: of Pillow.
    channels: 1 converts to grey, 3 to RGB.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: another number of channels, or an image of fractions, whose
      range nobody knows.
  """
  if channels not in _MODES:
    raise ValueError(
      f"image files have 1 or 3 channels, the model has {channels}"
    )
  if image.mode == "F":
    raise ValueError(
      "its pixels are floating-point numbers of unknown range, must be 8 or 16 "
      "bits"
    )
  _scale_transparency(image)
  image = _on_white(_to_8_bits(ImageOps.exif_transpose(image)))
  pixels = np.asarray(image.convert(_MODES[channels]))
  return pixels.reshape(*pixels.shape[:2], channels)


def _stored_mode(image: Image.Image) -> str:
  """How the file holds the pixels, "L;2" say; "" once they are read."""
  tiles = getattr(image, "tile", ())
  return str(tiles[0][3]) if tiles else ""


def _scale_transparency(image: Image.Image) -> None:
  """Brings the transparent level to the range that Pillow brings pixels to."""
  level, mode = image.info.get("transparency"), _stored_mode(image)
  if mode in _SCALES and isinstance(level, int):
    image.info["transparency"] = level * _SCALES[mode]
  elif mode == "RGB;16B" and isinstance(level, tuple):
    image.info["transparency"] = tuple(value >> 8 for value in level)


def _to_8_bits(image: Image.Image) -> Image.Image:
  """Scales 16-bit grey images, which Pillow's `convert` would clip to white."""
  if not image.mode.startswith("I"):
    return image
  pixels = np.clip(np.asarray(image), 0, 65535)
  level = image.info.get("transparency")
  if isinstance(level, int):  # what has it shows the white below
    pixels = np.where(pixels == level, 65535, pixels)
  return Image.fromarray(np.round(pixels / 257).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
  """Lays an image with transparent parts onto white.

  `convert` would show the colours that its transparent pixels happen to have.
  """
  if not image.has_transparency_data:
    return image
  image = image.convert("RGBA")
  white = Image.new("RGBA", image.size, "white")
  return Image.alpha_composite(white, image)
