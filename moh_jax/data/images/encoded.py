"""Sources of image files, and images that are decoded when they are cropped."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from moh_jax.data.identity import Identity
from moh_jax.data.images import files, jpeg

# A crop is decoded at a scale that leaves it at least so many times its size.
# Photographs that are halved so differ from wholly decoded ones by
# 0.6 of 255 levels on average (1.6 with 1, 0.3 with 3).
_SPARE = 2
_FACTORS = (8, 4, 2)  # scales that libjpeg-turbo decodes faster


class Record(NamedTuple):
  """An image file and its label; `place` names it in messages."""

  label: int
  place: str
  content: bytes


class EncodedSource(abc.ABC):
  """Random access to labelled image files; subclasses read them.

  Attributes:
    class_names: names of the classes, in the order of the labels.
    channels: 1 decodes to grey, 3 to RGB.
  """

  class_names: tuple[str, ...]
  channels: int

  @abc.abstractmethod
  def __len__(self) -> int:
    """Number of images."""

  @abc.abstractmethod
  def read(self, index: int) -> Record:
    """The file of an image, not decoded.

    Raises:
      FileNotFoundError: it is gone.
      ValueError: it cannot be read.
    """

  @abc.abstractmethod
  def name(self, index: int) -> str:
    """Name of an image, the same wherever the data lie."""

  @abc.abstractmethod
  def identity(self) -> Identity:
    """Identifies the images and their order."""

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Identifies the list of images."""

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns {"image": [X, Y, channels] uint8, "label": int32}.

    Raises:
      FileNotFoundError: the file is gone.
      ValueError: it is damaged; the message names it.
    """
    record = self.read(index)
    image = files.decode_image(record.content, self.channels, record.place)
    return {"image": image, "label": np.int32(record.label)}

  def open(self, index: int) -> dict[str, Any]:
    """As `source[index]`, but "image" of a JPEG file is a `LaterImage`."""
    record = self.read(index)
    if not jpeg.is_jpeg(record.content):
      image = files.decode_image(record.content, self.channels, record.place)
    else:
      image = LaterImage.of(record, self.channels)
    return {"image": image, "label": np.int32(record.label)}

  def describe(self, index: int) -> tuple[tuple[int, int], bool]:
    """Rows and columns of an image, and whether it is grey."""
    record = self.read(index)
    return files.describe_image(record.content, record.place)


@dataclasses.dataclass(frozen=True)
class LaterImage:
  """A JPEG file that a crop decodes as far as it needs.

  Attributes:
    record: the file.
    shape: upright rows, columns, channels.
    header: of the file; None where Pillow decodes it.
  """

  record: Record
  shape: tuple[int, int, int]
  header: jpeg.Header | None

  @classmethod
  def of(cls, record: Record, channels: int) -> "LaterImage":
    """Reads the header of a JPEG file.

    Raises:
      ValueError: it is damaged; the message names it.
    """
    header = jpeg.read_header(record.content)
    size = header or files.describe_image(record.content, record.place)[0]
    return cls(record, (*size[:2], channels), header)

  def region(
    self,
    size: tuple[int, int],
    box: tuple,
    *,
    fast: bool = False,
    reduced: bool = False,
  ) -> tuple[np.ndarray, tuple]:
    """Decodes for a box that is to be resized.

    Args:
      size: rows and columns that the box is resized to.
      box: (left, upper, right, lower) in pixels.
      fast: see `files.decode_image`.
      reduced: decode at a half, a quarter or an eighth of the sides where the
        box has `_SPARE` times the rows and columns of `size` there.

    Returns:
      The image down to the last row that `size` depends on, and the box in it.

    Raises:
      ValueError: the file is damaged; the message names it.
    """
    sides = box[3] - box[1], box[2] - box[0]
    factor = next(
      (
        factor
        for factor in (_FACTORS if reduced else ())
        if all(n >= _SPARE * factor * wanted for n, wanted in zip(sides, size))
      ),
      1,
    )
    # The filter reaches over two pixels of the smaller of the two images.
    reach = 2 * max(factor, sides[0] / size[0]) + factor
    rows = math.ceil(box[3] + reach)
    pixels = files.decode_image(
      self.record.content,
      self.shape[-1],
      self.record.place,
      factor,
      rows,
      fast=fast,
      header=self.header,
    )
    return pixels, tuple(edge / factor for edge in box)
