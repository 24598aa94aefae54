"""Image transforms: small picklable classes over {"image", "label"} examples.

Pixels are uint8 until `Normalize`.
"""

import dataclasses
from typing import Any

import grain
import numpy as np
from PIL import Image

from moh_jax.config import DataConfig, ImageModel

Example = dict[str, Any]


def resize(
  image: np.ndarray,
  size: tuple[int, int],
  box: tuple | None = None,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
  """Resize with antialiasing.

  Args:
    image: [X, Y, channels] uint8.
    size: rows and columns of the result.
    box: (left, upper, right, lower) part of the image to read; None is all.
    resample: the filter.

  Returns:
    [*size, channels] uint8.
  """
  if image.shape[:2] == tuple(size) and box is None:
    return image
  picture = Image.fromarray(
    image.squeeze(-1) if image.shape[-1] == 1 else image
  )
  rows, columns = size
  out = picture.resize((columns, rows), resample, box=box)
  return np.asarray(out).reshape(rows, columns, image.shape[-1])


@dataclasses.dataclass(frozen=True)
class Resize(grain.transforms.Map):
  """Resizes to `size` (rows, columns) whatever the aspect."""

  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes one example."""
    return {**element, "image": resize(element["image"], self.size)}


@dataclasses.dataclass(frozen=True)
class ResizeCenterCrop(grain.transforms.Map):
  """Resizes the shorter side to `shorter` pixels, then crops the centre."""

  shorter: int
  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes and crops one example."""
    image = element["image"]
    scale = self.shorter / min(image.shape[:2])
    scaled = tuple(
      max(round(side * scale), wanted)
      for side, wanted in zip(image.shape[:2], self.size)
    )
    image = resize(image, scaled)
    top, left = ((s - w) // 2 for s, w in zip(scaled, self.size))
    rows, columns = self.size
    return {**element, "image": image[top : top + rows, left : left + columns]}


@dataclasses.dataclass(frozen=True)
class CenterCrop(grain.transforms.Map):
  """ADM's centre crop (arXiv:2105.05233), as DiT and its FID use it.

  Halves the image with a box filter while it has twice the size, then resizes
  the shorter side with a bicubic one, then crops. Smaller images are enlarged.
  """

  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes and crops one example."""
    return {**element, "image": center_crop(element["image"], self.size)}


def center_crop(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """The rule of `CenterCrop`.

  Args:
    image: [X, Y, channels] uint8.
    size: rows and columns of the result.

  Returns:
    [*size, channels] uint8.
  """
  while all(s >= 2 * wanted for s, wanted in zip(image.shape, size)):
    halves = (image.shape[0] // 2, image.shape[1] // 2)
    image = resize(image, halves, resample=Image.Resampling.BOX)
  scale = max(wanted / s for s, wanted in zip(image.shape, size))
  scaled = tuple(
    max(round(s * scale), wanted) for s, wanted in zip(image.shape, size)
  )
  image = resize(image, scaled)
  top, left = ((s - wanted) // 2 for s, wanted in zip(scaled, size))
  return image[top : top + size[0], left : left + size[1]]


@dataclasses.dataclass(frozen=True)
class RandomFlip(grain.transforms.RandomMap):
  """Mirrors half of the images, left to right."""

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Mirrors one example, or does not."""
    if rng.random() < 0.5:
      return {**element, "image": element["image"][:, ::-1]}
    return element


@dataclasses.dataclass(frozen=True)
class RandomShift(grain.transforms.RandomMap):
  """Pads by an eighth of each side (at least one pixel) and crops at random."""

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Shifts one example."""
    image = element["image"]
    rows, columns = image.shape[:2]
    pads = [max(1, side // 8) for side in (rows, columns)]
    padded = np.pad(image, [(p, p) for p in pads] + [(0, 0)])
    top, left = (int(rng.integers(2 * p + 1)) for p in pads)
    return {
      **element,
      "image": padded[top : top + rows, left : left + columns],
    }


@dataclasses.dataclass(frozen=True)
class RandomCropFlip(grain.transforms.RandomMap):
  """Random resized crop (arXiv:1409.4842) and horizontal flip.

  Attributes:
    size: rows and columns of the result.
    area: smallest and largest share of the image's area.
    aspect: smallest and largest width over height.
  """

  size: tuple[int, int]
  area: tuple[float, float] = (0.08, 1.0)
  aspect: tuple[float, float] = (3 / 4, 4 / 3)

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Crops, resizes and flips one example."""
    image = element["image"]
    image = resize(image, self.size, self._box(image.shape[:2], rng))
    if rng.random() < 0.5:
      image = image[:, ::-1]
    return {**element, "image": image}

  def _box(self, shape: tuple[int, int], rng: np.random.Generator) -> tuple:
    rows, columns = shape
    for _ in range(10):
      area = rows * columns * rng.uniform(*self.area)
      ratio = np.exp(rng.uniform(*np.log(self.aspect)))
      width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
      if 0 < width <= columns and 0 < height <= rows:
        left = int(rng.integers(columns - width + 1))
        top = int(rng.integers(rows - height + 1))
        return left, top, left + width, top + height
    side = min(rows, columns)  # no crop of that shape fits: the centre square
    left, top = (columns - side) // 2, (rows - side) // 2
    return left, top, left + side, top + side


@dataclasses.dataclass(frozen=True)
class Normalize(grain.transforms.Map):
  """uint8 pixels to float32, (pixel / 255 - mean) / std per channel."""

  mean: tuple[float, ...]
  std: tuple[float, ...]

  def map(self, element: Example) -> Example:
    """Normalizes one example."""
    image = element["image"].astype(np.float32) / 255
    image = (image - np.float32(self.mean)) / np.float32(self.std)
    return {**element, "image": image}


def train_transforms(data: DataConfig, model: ImageModel) -> list:
  """The transforms of training images, in order."""
  size = model.input_shape[:2]
  normalize = Normalize(data.mean, data.std)
  if data.augment == "center_flip":
    return [CenterCrop(size), RandomFlip(), normalize]
  if data.augment == "crop_flip":
    return [RandomCropFlip(size), normalize]
  if data.augment == "shift":
    return [Resize(size), RandomShift(), normalize]
  return [Resize(size), normalize]


def eval_transforms(data: DataConfig, model: ImageModel) -> list:
  """The transforms of held-out images and of `classify`, in order."""
  size = model.input_shape[:2]
  fit = Resize(size)
  if data.augment == "center_flip":
    fit = CenterCrop(size)
  elif data.eval_resize:
    fit = ResizeCenterCrop(data.eval_resize, size)
  return [fit, Normalize(data.mean, data.std)]
