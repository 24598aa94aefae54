"""Image files: reading, decoding to pixels, and resizing."""

import contextlib
import dataclasses
import functools
import io
import math
import os
import threading
import warnings
from collections.abc import Iterator
from typing import IO

import numpy as np
from etils import epath
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from moh_jax.data import jpeg
from moh_jax.data.decoding_memory import DECODING_MEMORY, MOST_PIXELS
from moh_jax.data.input_files import import_extra
from moh_jax.runtime import files

_MOST_BYTES = 1 << 28  # of an image file
_BYTES = 20  # a pixel, that decoding with Pillow takes at most
_OF_COPIES = 2  # bytes a sample that resizing takes
_BAND = 1 << 20  # pixels that are converted at a time
# Of formats that Pillow decodes in Python, or in 16 bytes a pixel.
_MOST_SLOW_PIXELS = 1 << 24
# What is opened, whatever a file is called. Pillow knows more, of icons and
# games too; for EPS it runs another program, Ghostscript.
_FORMATS = tuple("AVIF BMP DIB GIF JPEG JPEG2000 PNG PPM TIFF WEBP".split())
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that swap rows and columns
_MODES = {1: "L", 3: "RGB"}
# Tags of TIFF.
_BITS, _BLACK, _SAMPLE_FORMAT = 258, 262, 339
_PLANAR, _TILE_WIDTH, _TILE_LENGTH = 284, 322, 323
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")
# What Pillow multiplies the samples of grey PNG files of 2 and 4 bits by.
_SCALES = {"L;2": 85, "L;4": 17}

# A crop is decoded at a scale that leaves it at least so many times its size.
# Photographs that are halved so differ from wholly decoded ones by
# 0.6 of 255 levels on average (1.6 with 1, 0.3 with 3).
_SPARE = 2
_FACTORS = (8, 4, 2)  # scales that libjpeg-turbo decodes faster
_OF_THREAD = threading.local()
# Blocks above 32 MB, unlike Pillow's of 16, glibc gives back to the system when
# they are free; else every thread keeps as much as its largest image took.
if "PILLOW_BLOCK_SIZE" not in os.environ:
  Image.core.set_block_size(1 << 26)


def read_image(file: str | os.PathLike, channels: int) -> np.ndarray:
  """Reads one image file in one of `_FORMATS`.

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
  try:
    return files.read_bytes(path, _MOST_BYTES)
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
) -> np.ndarray:
  """Decodes one image from the bytes of its file.

  Args:
    content: bytes of a file in one of `_FORMATS`.
    channels: 1 converts to grey, 3 to RGB.
    name: name of the image, for error messages.
    factor: 2, 4 or 8 decodes a JPEG file to so many times fewer rows and
      columns (rounded up), which takes less time; only for JPEG.
    rows: how many of the whole image are needed from the top; None is all. The
      result may have more.
    fast: does not interpolate the colours of a JPEG file that has fewer of them
      than pixels, which changes these by about a level on average. Only with
      simplejpeg.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: the bytes are not an image, or truncated.
  """
  with _named_errors(name):
    jpeg.check_scans(content)
  if channels in _MODES:
    pixels = jpeg.decode(content, channels, factor, rows, fast=fast)
    if pixels is not None:
      return pixels
  with _named_errors(name), open_picture(io.BytesIO(content)) as image:
    _check_plausible(image)
    needed = max(math.prod(image.size), _tile_pixels(image)) * _BYTES
    if factor > 1:
      image.draft(None, (image.width // factor, image.height // factor))
    with DECODING_MEMORY.reserved(needed):
      return to_pixels(image, channels)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
  """Turns any error of reading an image into a ValueError that names it."""
  try:
    yield
  except UnidentifiedImageError as error:
    raise ValueError(f"{name}: not an image of a known format") from error
  except Exception as error:  # a damaged image raises nearly anything
    raise ValueError(f"{name}: damaged or truncated image: {error}") from error


@contextlib.contextmanager
def open_picture(file: str | os.PathLike | IO[bytes]) -> Iterator[Image.Image]:
  """Opens an image whose size is in bounds; its pixels are not read yet.

  Raises:
    ValueError: it has more than `MOST_PIXELS` pixels.
  """
  with warnings.catch_warnings():
    # Pillow warns of odd but readable files; unreadable ones raise.
    warnings.simplefilter("ignore")
    with Image.open(file, formats=_FORMATS) as image:
      if math.prod(image.size) > MOST_PIXELS:
        columns, rows = image.size
        raise ValueError(
          f"{rows} rows x {columns} columns, must be at most {MOST_PIXELS:,} "
          "pixels"
        )
      yield image


def _check_plausible(image: Image.Image) -> None:
  """Refuses what is too large for its decoder."""
  decoder, _ = _stored(image)
  is_slow = decoder in Image.DECODERS or image.format == "JPEG2000"
  if (of_tile := _tile_pixels(image)) > MOST_PIXELS:
    raise ValueError(
      f"tiles of {of_tile:,} pixels, must be at most {MOST_PIXELS:,}"
    )
  # Numbers written as text take a few microseconds each.
  most = _MOST_SLOW_PIXELS // (8 if decoder == "ppm_plain" else 1)
  if is_slow and math.prod(image.size) > most:
    raise ValueError(
      f"{image.size[1]} rows x {image.size[0]} columns, must be at most "
      f"{most:,} pixels in this kind of {image.format} file"
    )


def describe_image(content: bytes, name: str) -> tuple[tuple[int, int], bool]:
  """What the header of an image file says; its pixels are not decoded.

  Args:
    content: bytes of a file in one of `_FORMATS`.
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
    ValueError: another number of channels, pixels whose range nobody knows, or
      a transparent colour of 16 bits.
  """
  if channels not in _MODES:
    raise ValueError(
      f"image files have 1 or 3 channels, the model has {channels}"
    )
  _check_samples(image)
  _scale_transparency(image)
  image.load()  # a PNG file may note its orientation behind the pixels
  if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
    image = ImageOps.exif_transpose(image)  # which copies any
  pixels = np.empty((image.height, image.width, channels), np.uint8)
  step = max(_BAND // image.width, 1)
  for row in range(0, image.height, step):
    box = (0, row, image.width, min(row + step, image.height))
    band = _on_white(_to_8_bits(image.crop(box)))
    band = np.asarray(band.convert(_MODES[channels]))
    pixels[row : row + step] = band.reshape(-1, image.width, channels)
  return pixels


def _tile_pixels(image: Image.Image) -> int:
  """Pixels of a tile of a TIFF file, all of which are decoded for any."""
  tags = getattr(image, "tag_v2", {})
  return int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_LENGTH, 0))


def _check_samples(image: Image.Image) -> None:
  """Refuses pixels that Pillow hands on as they are stored, whatever they mean.

  They are fractions, have a sign, 12 or 32 bits, or 16 of which 0 is white. And
  colours of 16 bits, one after the other, which it takes for those of 8.
  """
  tags = getattr(image, "tag_v2", {})  # of a TIFF file
  kinds, bits = tags.get(_SAMPLE_FORMAT, (1,)), tags.get(_BITS, (16,))
  is_wide = image.mode.startswith("I")
  is_planar = tags.get(_PLANAR) == 2 and not is_wide
  is_misread = is_planar and _stored(image)[0] == "raw"
  for is_so, what in (
    (image.mode == "F", "floating-point numbers"),
    (set(kinds) != {1}, "numbers with a sign"),
    (is_wide and bits != (16,), f"of {bits[0]} bits"),
    (is_wide and not tags.get(_BLACK, 1), "of 16 bits, of which 0 is white"),
    (
      is_misread and tags.get(_BITS, (1,))[0] > 8,
      "planes of 16 bits, not compressed",
    ),
  ):
    if is_so:
      raise ValueError(
        f"its pixels are {what}, must be of 8 or 16 bits from black to white"
      )


def _stored(image: Image.Image) -> tuple[str, str]:
  """The decoder and how the file holds the pixels, "L;2" say; "" once read."""
  tiles = getattr(image, "tile", ())
  return (tiles[0][0], str(tiles[0][3])) if tiles else ("", "")


def _scale_transparency(image: Image.Image) -> None:
  """Brings the transparent level to the range that Pillow brings pixels to.

  Of colours of 16 bits it keeps 8, which do not tell what is transparent.
  """
  level, (_, mode) = image.info.get("transparency"), _stored(image)
  if mode in _SCALES and isinstance(level, int):
    image.info["transparency"] = level * _SCALES[mode]
  elif mode == "RGB;16B" and isinstance(level, tuple):
    raise ValueError(
      "one of its colours of 16 bits is transparent; save it with an alpha "
      "channel, or in 8 bits"
    )


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


@dataclasses.dataclass(frozen=True)
class LaterImage:
  """A JPEG file that a crop decodes as far as it needs.

  Attributes:
    content: of the file.
    place: names it in messages.
    shape: upright rows, columns, channels.
  """

  content: bytes
  place: str
  shape: tuple[int, int, int]

  def region(
    self,
    size: tuple[int, int],
    box: tuple | None,
    *,
    fast: bool = False,
    reduced: bool = False,
  ) -> tuple[np.ndarray, tuple | None]:
    """Decodes for a box that is to be resized.

    Args:
      size: rows and columns that the box is resized to.
      box: (left, upper, right, lower) in pixels; None is all of it.
      fast: see `decode_image`; only with a box.
      reduced: decode at a half, a quarter or an eighth of the sides where the
        box has `_SPARE` times the rows and columns of `size` there.

    Returns:
      The image down to the last row that `size` depends on, and the box in it.

    Raises:
      ValueError: the file is damaged; the message names it.
    """
    what = self.content, self.shape[-1], self.place
    if box is None:
      return decode_image(*what), None
    sides = box[3] - box[1], box[2] - box[0]
    scale = min(n / (_SPARE * wanted) for n, wanted in zip(sides, size))
    factors = _FACTORS if reduced else ()
    factor = next((factor for factor in factors if factor <= scale), 1)
    # The filter reaches over two pixels of the smaller of the two images.
    reach = 2 * max(factor, sides[0] / size[0]) + factor
    rows = math.ceil(box[3] + reach)
    pixels = decode_image(*what, factor, rows, fast=fast)
    return pixels, tuple(edge / factor for edge in box)


def decode_later(
  content: bytes, channels: int, name: str
) -> np.ndarray | LaterImage:
  """As `decode_image`, but of a JPEG file only the header is read.

  Raises:
    ValueError: it is damaged; the message names it.
  """
  if not content.startswith(jpeg.START):
    return decode_image(content, channels, name)
  size = jpeg.read_header(content) or describe_image(content, name)[0]
  return LaterImage(content, name, (*size[:2], channels))


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
      reads all of it.
    resample: Pillow's filter.
    fast: resize with cykooz_resizer, bicubic whatever `resample` says: Pillow's
      result within a few levels (0.2 on average of photographs). An image that
      is to be decoded for a box is decoded as `fast` of `decode_image` says.
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
  with DECODING_MEMORY.reserved(image.size * _OF_COPIES):
    if fast:
      return _resize_fast(image, size, box or (0, 0, *image.shape[1::-1]))
    picture = to_picture(image).resize(size[::-1], resample, box=box)
    return to_array(picture)


def _resize_fast(
  image: np.ndarray, size: tuple[int, int], box: tuple
) -> np.ndarray:
  lib, pixels, bicubic = _cykooz(image.shape[-1])
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
def _cykooz(channels: int) -> tuple:
  """The library cykooz_resizer, its type of the pixels, and the filter."""
  lib = import_extra("cykooz_resizer", "data.decode='fast'", "images")
  pixels = lib.PixelType.U8 if channels == 1 else lib.PixelType.U8x3
  return lib, pixels, lib.ResizeAlg.convolution(lib.FilterType.catmull_rom)


def to_picture(image: np.ndarray) -> Image.Image:
  """Makes Pillow's image of an array.

  Args:
    image: [X, Y, 1 or 3] uint8, grey or RGB.

  Raises:
    ValueError: it has other channels.
  """
  if image.shape[-1] not in (1, 3):
    raise ValueError(f"image of shape {image.shape} must have 1 or 3 channels")
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def to_array(picture: Image.Image) -> np.ndarray:
  """The pixels [X, Y, channels] uint8 of a grey or RGB image."""
  image = np.asarray(picture)
  return image[..., None] if image.ndim == 2 else image


def mirror(image: np.ndarray) -> np.ndarray:
  """Swaps left and right of an image [X, Y, channels] uint8.

  Copying channel by channel takes a quarter of the time that numpy and Pillow
  take for a view [:, ::-1].
  """
  mirrored = np.empty_like(image)
  for channel in range(image.shape[-1]):
    mirrored[..., channel] = image[:, ::-1, channel]
  return mirrored
