"""Image files: reading, decoding to pixels, and resizing.

JPEG files go through simplejpeg where that is installed, which decodes faster
than Pillow to the same pixels, as both call libjpeg-turbo. What it cannot read,
or only with a warning, is left to Pillow, so errors are Pillow's too.
"""

import io
import os

import numpy as np
from etils import epath
from PIL import ExifTags, Image, ImageOps

try:
  import simplejpeg
except ModuleNotFoundError:
  simplejpeg = None

# What is opened, whatever a file is called. Pillow knows more, of icons and
# games too; for EPS it runs another program, Ghostscript.
_FORMATS = tuple("AVIF BMP DIB GIF JPEG JPEG2000 PNG PPM TIFF WEBP".split())
_JPEG = b"\xff\xd8\xff"  # first bytes
# Where one of these stands in a JPEG file, it may ask to be turned.
_ORIENTATIONS = (b"Exif\x00", b"tiff:Orientation")
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that swap rows and columns
_MODES = {1: "L", 3: "RGB"}
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")


def read_image(file: str | os.PathLike, channels: int) -> np.ndarray:
  """Reads one image file, local or in a bucket, as `decode_image` does.

  Raises:
    OSError: it cannot be read.
    ValueError: it is not an image, or truncated.
  """
  content = epath.Path(file).read_bytes()
  return decode_image(content, channels, os.fspath(file))


def _opened(content: bytes, name: str) -> Image.Image:
  """Pillow's image of a file; its pixels are not read yet."""
  try:
    return Image.open(io.BytesIO(content), formats=_FORMATS)
  except Exception as error:  # a damaged image raises nearly anything
    text = str(error).partition(" <_io.")[0]  # a name of our own bytes
    raise ValueError(f"{name}: not an image: {text}") from error


def describe_image(content: bytes, name: str) -> tuple[tuple[int, int], bool]:
  """What the header of an image file says; its pixels are not decoded.

  Of a PNG file that is to be turned, rows and columns are those before.

  Args:
    content: of the file.
    name: name of the image, for error messages.

  Returns:
    Rows and columns as a viewer shows them, and whether the image is grey.

  Raises:
    ValueError: it is not an image.
  """
  with _opened(content, name) as image:
    rows, columns = image.size[::-1]
    # Pillow has turned TIFF files; a PNG file may note it behind the pixels.
    known = image.format not in ("PNG", "TIFF")
    if known and _orientation(image) in _TURNED:
      rows, columns = columns, rows
    return (rows, columns), image.mode.partition(";")[0] in _GREY_MODES


def _orientation(image: Image.Image) -> int:
  return image.getexif().get(ExifTags.Base.Orientation, 1)


def decode_image(content: bytes, channels: int, name: str) -> np.ndarray:
  """Decodes one image from the bytes of its file.

  Args:
    content: of the file.
    channels: 1 converts to grey, 3 to RGB.
    name: name of the image, for error messages.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: the bytes are not an image, or truncated.
  """
  pixels = _decode_jpeg(content, channels)
  if pixels is not None:
    return pixels
  with _opened(content, name) as image:
    try:
      return to_pixels(image, channels)
    except Exception as error:  # a damaged image raises nearly anything
      raise ValueError(f"{name}: damaged image: {error}") from error


def _decode_jpeg(content: bytes, channels: int) -> np.ndarray | None:
  """Decodes a JPEG file by simplejpeg; None leaves it to Pillow."""
  is_turned = any(mark in content for mark in _ORIENTATIONS)
  if simplejpeg is None or is_turned or not content.startswith(_JPEG):
    return None
  ours, theirs = {1: ("Gray", "GRAY"), 3: ("YCbCr", "RGB")}[channels]
  try:
    if simplejpeg.decode_jpeg_header(content)[2] == ours:
      return simplejpeg.decode_jpeg(content, theirs)
  except ValueError:
    pass
  return None


def to_pixels(image: Image.Image, channels: int) -> np.ndarray:
  """The pixels of an image of any mode, as a viewer shows them.

  The camera's orientation (EXIF) is applied, what is transparent becomes white,
  and of an animation the first frame is taken. 16 bits become 8.

  Args:
    image: of Pillow.
    channels: 1 converts to grey, 3 to RGB.

  Returns:
    [X, Y, channels] uint8.
  """
  image.load()  # a PNG file may note its orientation behind the pixels
  if _orientation(image) != 1:
    image = ImageOps.exif_transpose(image)
  if image.mode == "F":
    raise ValueError(
      "its pixels are floating-point numbers of no known range; make them 8 or "
      "16 bits"
    )
  if image.mode.startswith("I"):  # 16 bits, which `convert` would clip to white
    grey = np.clip(np.asarray(image), 0, 65535) / 257
    image = Image.fromarray(np.round(grey).astype(np.uint8))
  if image.has_transparency_data:
    # `convert` would show the colours that transparent pixels happen to have.
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image)
  return to_array(image.convert(_MODES[channels]))


def resize(
  image: np.ndarray,
  size: tuple[int, int],
  box: tuple | None = None,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
  """Resizes an image with antialiasing.

  Args:
    image: [X, Y, channels] uint8.
    size: rows and columns of the result.
    box: part of the image to read, (left, upper, right, lower) in pixels; None
      reads all of it.
    resample: Pillow's filter.

  Returns:
    [*size, channels] uint8.
  """
  if image.shape[:2] == tuple(size) and box is None:
    return image
  return to_array(to_picture(image).resize(size[::-1], resample, box=box))


def to_picture(image: np.ndarray) -> Image.Image:
  """Makes Pillow's image of an array [X, Y, 1 or 3] uint8, grey or RGB."""
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def to_array(picture: Image.Image) -> np.ndarray:
  """The pixels [X, Y, channels] uint8 of a grey or RGB image."""
  return np.atleast_3d(np.asarray(picture))
