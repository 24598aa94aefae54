"""Resizing of uint8 images with antialiasing, by Pillow or a faster library."""

import functools
import threading

import numpy as np
from PIL import Image

from moh_jax.data.extras import import_extra
from moh_jax.data.images.encoded import LaterImage
from moh_jax.data.images.pictures import to_array, to_picture

_OF_THREAD = threading.local()


def resize(
  image: np.ndarray | LaterImage,
  size: tuple[int, int],
  box: tuple | None = None,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
  *,
  fast: bool = False,
  reduced: bool = False,
) -> np.ndarray:
  """Resizes an image with antialiasing.

  Args:
    image: [X, Y, channels] uint8, or one to decode as far as `box` needs.
    size: rows and columns of the result.
    box: part of the image to read, (left, upper, right, lower) in pixels; None
      reads all of it, and is for arrays.
    resample: Pillow's filter.
    fast: resize with cykooz_resizer, bicubic whatever `resample` says: Pillow's
      result within a few levels (0.2 on average of photographs). An image that
      is to be decoded is decoded as `fast` of `files.decode_image` says.
    reduced: decode at a smaller scale where `box` is large.

  Returns:
    [*size, channels] uint8.

  Raises:
    ValueError: the image is to be decoded, and damaged.
  """
  if isinstance(image, LaterImage):
    image, box = image.region(size, box, fast=fast, reduced=reduced)
  if image.shape[:2] == tuple(size) and box is None:
    return image
  if fast:
    return _resize_fast(image, size, box or (0, 0, *image.shape[1::-1]))
  rows, columns = size
  return to_array(to_picture(image).resize((columns, rows), resample, box=box))


def _resize_fast(
  image: np.ndarray, size: tuple[int, int], box: tuple
) -> np.ndarray:
  lib, pixels, bicubic = _library(image.shape[-1])
  left, upper, right, lower = box
  # Rows above and below the box are not copied, but for those that its filter
  # reads, 2 pixels of the smaller of the two images.
  margin = int(2 * max(1, (lower - upper) / size[0])) + 1
  first = max(int(upper) - margin, 0)
  image = image[first : int(lower) + margin + 1]
  rows, columns, channels = image.shape
  source = lib.ImageData(columns, rows, pixels, image.tobytes())
  target = lib.ImageData(size[1], size[0], pixels)
  options = lib.ResizeOptions(
    resize_alg=bicubic,
    crop_box=lib.CropBox(left, upper - first, right - left, lower - upper),
  )
  # One per thread: it holds memory that is used again.
  if not hasattr(_OF_THREAD, "resizer"):
    _OF_THREAD.resizer = lib.Resizer()
  _OF_THREAD.resizer.resize(source, target, options)
  return np.frombuffer(target.get_buffer(), np.uint8).reshape(*size, channels)


@functools.cache
def _library(channels: int) -> tuple:
  """The library, its type of the pixels, and the filter."""
  lib = import_extra("cykooz_resizer", "data.decode='fast'", "images")
  pixels = lib.PixelType.U8 if channels == 1 else lib.PixelType.U8x3
  return (
    lib,
    pixels,
    lib.ResizeAlg.convolution(lib.FilterType.catmull_rom),
  )
