"""Random changes to training images beyond crop and flip, as timm makes them.

Each is a pure function of an image and a numpy generator, for uint8 images
[X, Y, 1 or 3].
"""

import dataclasses
import functools
import math
import statistics
from typing import Any

import grain
import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from moh_jax.config import DataConfig
from moh_jax.config.data import (
  THREE_AUGMENT,
  RandAugmentPolicy,
  parse_policy,
)
from moh_jax.data.images.operations import INCREASING, PLAIN
from moh_jax.data.images.pictures import to_array, to_picture

_LEVEL_UNIT = 10  # magnitude at which an argument is at the end of its range
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
_DRAWS = 1 << 16  # as many as a uint16 has values


class _ImageMap(grain.transforms.RandomMap):
  """A random change of the image of an example."""

  def random_map(
    self, element: dict[str, Any], rng: np.random.Generator
  ) -> dict[str, Any]:
    """Changes one example."""
    return {**element, "image": self.change(element["image"], rng)}

  def change(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes an image [X, Y, channels] uint8, which is not written to."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RandAugment(_ImageMap):
  """Applies some of timm's fifteen operations (arXiv:1909.13719).

  Attributes:
    policy: how many, how strong and how often.
    fill: colour of what comes into view, one value per channel in [0, 255].
  """

  policy: RandAugmentPolicy
  fill: tuple[int, ...]

  def change(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes one image."""
    policy = self.policy
    operations = tuple((INCREASING if policy.increasing else PLAIN).values())
    chosen = rng.integers(len(operations), size=policy.layers)
    applied = chosen[rng.random(policy.layers) < policy.probability]
    if not len(applied):
      return image
    picture = to_picture(image)
    fill = self.fill if len(self.fill) > 1 else self.fill[0]
    for index in applied:
      level = self._magnitude(rng) / _LEVEL_UNIT
      if operations[index].signed and rng.random() < 0.5:
        level = -level
      picture = operations[index].apply(picture, level, fill)
    return to_array(picture)

  def _magnitude(self, rng: np.random.Generator) -> float:
    """Samples a magnitude."""
    policy, magnitude = self.policy, float(self.policy.magnitude)
    if math.isinf(policy.spread):
      magnitude = rng.uniform(0, magnitude)
    elif policy.spread:
      magnitude = rng.normal(magnitude, policy.spread)
    return max(0.0, min(magnitude, policy.limit))


@dataclasses.dataclass(frozen=True)
class ThreeAugment(_ImageMap):
  """Makes an image grey, solarizes or blurs it (DeiT III, arXiv:2204.07118).

  One of the three happens to every image, each as often: greys; pixels from 128
  on inverted; Gaussian blur with a radius between 0.1 and 2 pixels.
  """

  def change(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes one image."""
    picture = to_picture(image)
    choice = rng.integers(3)
    if choice == 0:
      picture = ImageOps.solarize(picture, 128)
    elif choice == 1:
      picture = ImageEnhance.Color(picture).enhance(0.0)
    else:
      blur = ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0))
      picture = picture.filter(blur)
    return to_array(picture)


@dataclasses.dataclass(frozen=True)
class ColorJitter(_ImageMap):
  """Changes brightness, contrast and saturation, in random order.

  Attributes:
    strength: each is multiplied by a factor that is uniform between
      1 - strength (at least 0) and 1 + strength.
  """

  strength: float

  def change(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes one image."""
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    picture: Image.Image = to_picture(image)
    low, high = max(0.0, 1 - self.strength), 1 + self.strength
    for index in rng.permutation(len(kinds)):
      picture = kinds[index](picture).enhance(rng.uniform(low, high))
    return to_array(picture)


@dataclasses.dataclass(frozen=True)
class RandomErasing(_ImageMap):
  """Fills a random box with noise (arXiv:1708.04896), timm's mode "pixel".

  The box has 2 % to a third of the area, and height over width between 0.3 and
  1 / 0.3. Noise is standard normal in normalized units, as timm's, but here it
  is rounded and cut off at black and white: an image is bytes until the step.

  Attributes:
    probability: of an image to be changed.
    mean: of the normalization, one value per channel.
    std: of the normalization, above 0.
  """

  probability: float
  mean: tuple[float, ...]
  std: tuple[float, ...]

  def change(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes one image."""
    if rng.random() >= self.probability:
      return image
    box = sample_box(image.shape[:2], rng)
    if box is None:
      return image
    top, left, height, width = box
    image = image.copy()
    erased = image[top : top + height, left : left + width]
    for channel, (mean, std) in enumerate(zip(self.mean, self.std)):
      draws = rng.integers(_DRAWS, size=(height, width), dtype=np.uint16)
      erased[..., channel] = _normal_pixels(mean, std)[draws]
    return image


@functools.cache
def _normal_pixels(mean: float, std: float) -> np.ndarray:
  """Pixels [65536] uint8 of which a random one is normally distributed.

  To look pixels up takes a quarter of the time of normal numbers.

  Args:
    mean: of pixel / 255, before pixels are rounded and cut off.
    std: of pixel / 255.
  """
  pixels = statistics.NormalDist(255 * mean, 255 * std)
  below = [round(_DRAWS * pixels.cdf(value + 0.5)) for value in range(255)]
  counts = np.diff([0, *below, _DRAWS])
  return np.repeat(np.arange(256, dtype=np.uint8), counts)


def sample_box(
  shape: tuple[int, int], rng: np.random.Generator
) -> tuple[int, int, int, int] | None:
  """Samples the box that `RandomErasing` fills.

  Args:
    shape: rows and columns of the image.
    rng: random numbers.

  Returns:
    Top row, left column, height and width; None if ten boxes did not fit.
  """
  rows, columns = shape
  for _ in range(10):
    area = rows * columns * rng.uniform(*_ERASED_AREA)
    ratio = math.exp(rng.uniform(*map(math.log, _ERASED_ASPECT)))
    height, width = (
      round(math.sqrt(area * ratio)),
      round(math.sqrt(area / ratio)),
    )
    if height < rows and width < columns:
      top = int(rng.integers(rows - height + 1))
      left = int(rng.integers(columns - width + 1))
      return top, left, height, width
  return None


def augmentations(data: DataConfig) -> list:
  """The changes that follow crop and flip, in timm's order."""
  chosen: list = []
  policy = parse_policy(data.auto_augment, "data.auto_augment")
  if policy:
    fill = tuple(min(255, round(255 * value)) for value in data.mean or ())
    chosen.append(RandAugment(policy, fill))
  elif data.auto_augment == THREE_AUGMENT:
    chosen.append(ThreeAugment())
  if data.color_jitter:
    chosen.append(ColorJitter(data.color_jitter))
  if data.random_erasing:
    chosen.append(RandomErasing(data.random_erasing, data.mean, data.std))
  return chosen
