"""Image files: lists of folders with classes, and decoding to pixels."""

import contextlib
import hashlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from typing import IO

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

from moh_jax.files import DEFLATE_RATIO

SPLITS = ("train", "val")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# A larger image takes more than a gigabyte while it is decoded.
_MOST_PIXELS = 89_478_485
_MOST_BYTES = 1 << 28  # of an image file
_MODES = {1: "L", 3: "RGB"}


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
  """Reads an image file without decoding it.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is too large, or cannot be read.
  """
  path = epath.Path(file)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such image file")
  if (size := path.stat().length) > _MOST_BYTES:
    raise ValueError(f"{path}: {size:,} bytes, must be at most {_MOST_BYTES:,}")
  try:
    return path.read_bytes()
  except OSError as error:
    raise ValueError(f"{path}: cannot be read: {error}") from error


def decode_image(content: bytes, channels: int, name: str) -> np.ndarray:
  """Decodes one image from the bytes of its file.

  Args:
    content: bytes of a file in any format that Pillow knows.
    channels: 1 converts to grey, 3 to RGB.
    name: name of the image, for error messages.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: the bytes are not an image, or truncated.
  """
  try:
    with open_picture(io.BytesIO(content)) as image:
      _check_plausible(image, len(content))
      return to_pixels(image, channels)
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
  bits = {"1": 1, "L": 8, "P": 1, "I;16": 16, "RGB": 24}.get(image.mode, 8)
  least = math.prod(image.size) * bits // 8 // DEFLATE_RATIO
  if image.format == "PNG" and size < least:
    raise ValueError(
      f"{size:,} bytes cannot hold {image.size[1]} rows x {image.size[0]} "
      "columns"
    )


def to_pixels(image: Image.Image, channels: int) -> np.ndarray:
  """The pixels of an image of any mode.

  Args:
    image: of Pillow.
    channels: 1 converts to grey, 3 to RGB.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    ValueError: another number of channels.
  """
  if channels not in _MODES:
    raise ValueError(
      f"image files have 1 or 3 channels, the model has {channels}"
    )
  pixels = np.asarray(_to_8_bits(image).convert(_MODES[channels]))
  return pixels.reshape(*pixels.shape[:2], channels)


def list_images(
  folder: str | os.PathLike,
) -> tuple[tuple[str, ...], list[tuple[str, int]]]:
  """Lists the images FOLDER/CLASS/*, classes in alphabetical order.

  Args:
    folder: local directory or bucket.

  Returns:
    The class names, and for each file ("CLASS/NAME", label).

  Raises:
    FileNotFoundError: there is no image.
  """
  root = epath.Path(folder)
  classes = list_classes(root)
  files = [
    (f"{entry.name}/{file.name}", label)
    for label, entry in enumerate(classes)
    for file in sorted(entry.iterdir())
    if file.suffix.lower() in _SUFFIXES
  ]
  if not files:
    raise FileNotFoundError(
      f"{root} holds no image; expected {root}/CLASS/* with a suffix in "
      f"{_SUFFIXES}"
    )
  return tuple(entry.name for entry in classes), files


def list_classes(folder: str | os.PathLike) -> list[epath.Path]:
  """The directories folder/CLASS, in alphabetical order.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  root = epath.Path(folder)
  if not root.is_dir():
    raise FileNotFoundError(
      f"{root}: no such directory; expected {root}/CLASS/*"
    )
  return sorted(
    entry
    for entry in root.iterdir()
    if entry.is_dir() and not entry.name.startswith(".")
  )


def fingerprint(files: list[tuple[str, int]]) -> str:
  """Identifies a list of images and labels: its length and a hash of names."""
  digest = hashlib.sha256()
  for name, label in files:
    digest.update(f"{label} {name}\n".encode(errors="surrogateescape"))
  return f"{len(files)} files, sha256 {digest.hexdigest()[:16]}"


def find_splits(
  root: str | os.PathLike, split: str | None = None
) -> dict[str, epath.Path]:
  """Finds the splits of a directory of images.

  Args:
    root: directory that holds train/ and val/ (or one of them), or the classes
      or packed images of one split directly.
    split: the wanted split; None finds all. If `root` is one split directly,
      this is the name it gets, "train" for None.

  Returns:
    Folders by the name of the split.

  Raises:
    FileNotFoundError: there is no such directory or split.
  """
  root = epath.Path(root)
  if not root.is_dir():
    raise FileNotFoundError(f"{root}: no such directory of images")
  found = {name: root / name for name in SPLITS if _is_split(root / name)}
  if not found:
    return {split or SPLITS[0]: root}
  if split is None:
    return found
  if split not in found:
    raise FileNotFoundError(
      f"{root} has no split {split!r}, only {sorted(found)}"
    )
  return {split: found[split]}


def _is_split(folder: epath.Path) -> bool:
  """Whether a folder holds classes or packed images.

  A class may be called "train" too, but holds image files alone.
  """
  return folder.is_dir() and any(
    entry.is_dir() or entry.name == "metadata.json"
    for entry in folder.iterdir()
  )


def _to_8_bits(image: Image.Image) -> Image.Image:
  """Scales 16-bit grey images, which Pillow's `convert` would clip to white."""
  if not image.mode.startswith("I"):
    return image
  pixels = np.clip(np.asarray(image), 0, 65535)
  return Image.fromarray(np.round(pixels / 257).astype(np.uint8))
