"""Random changes to training images beyond crop and flip, as timm makes them.

Each is a pure function of an image and a numpy generator, for uint8 images
[X, Y, 1 or 3]. The operations of RandAugment have the pixels of timm 1.0.31:
what a magnitude means, signs, bicubic resampling, the colour of what comes into
view.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
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
from moh_jax.data.decode import to_array, to_picture
from moh_jax.data.sources import Example

Picture = Image.Image
_LEVEL_UNIT = 10  # magnitude at which an argument is at the end of its range
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
_DRAWS = 1 << 16  # as many as a uint16 has values
_SOLARIZED = 128  # pixels below this are brightened by solarize_add


class _ImageMap(grain.transforms.RandomMap):
  """A random change of the image of an example."""

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
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
    picture, choice = to_picture(image), rng.integers(3)
    if choice == 0:
      return to_array(ImageOps.solarize(picture, 128))
    if choice == 1:
      return to_array(ImageEnhance.Color(picture).enhance(0.0))
    blur = ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0))
    return to_array(picture.filter(blur))


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
    rows, columns = image.shape[:2]
    for _ in range(10):
      area = rows * columns * rng.uniform(*_ERASED_AREA)
      ratio = math.exp(rng.uniform(*map(math.log, _ERASED_ASPECT)))
      sides = area * ratio, area / ratio
      height, width = (round(math.sqrt(side)) for side in sides)
      if height < rows and width < columns:
        break
    else:
      return image
    top = int(rng.integers(rows - height + 1))
    left = int(rng.integers(columns - width + 1))
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


def augmentations(data: DataConfig) -> list:
  """The changes that follow crop and flip, in timm's order."""
  chosen: list = []
  policy = parse_policy(data.auto_augment)
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


@dataclasses.dataclass(frozen=True)
class Operation:
  """One kind of change.

  Attributes:
    apply: maps (grey or RGB image, level, fill) to the changed image. The level
      is magnitude / 10, negated for half of the images where `signed`; `fill`
      is the colour of what comes into view.
    signed: whether the level may be negative.
  """

  apply: Callable[[Picture, float, Any], Picture]
  signed: bool = False


def _slide(picture: Picture, matrix: tuple[float, ...], fill: Any) -> Picture:
  return picture.transform(
    picture.size,
    Image.Transform.AFFINE,
    matrix,
    resample=Image.Resampling.BICUBIC,
    fillcolor=fill,
  )


def _shear_x(picture: Picture, level: float, fill: Any) -> Picture:
  return _slide(picture, (1, level * 0.3, 0, 0, 1, 0), fill)


def _shear_y(picture: Picture, level: float, fill: Any) -> Picture:
  return _slide(picture, (1, 0, 0, level * 0.3, 1, 0), fill)


def _move_x(picture: Picture, level: float, fill: Any) -> Picture:
  return _slide(picture, (1, 0, level * 0.45 * picture.width, 0, 1, 0), fill)


def _move_y(picture: Picture, level: float, fill: Any) -> Picture:
  return _slide(picture, (1, 0, 0, 0, 1, level * 0.45 * picture.height), fill)


def _rotate(picture: Picture, level: float, fill: Any) -> Picture:
  bicubic = Image.Resampling.BICUBIC
  return picture.rotate(level * 30.0, resample=bicubic, fillcolor=fill)


def _lookup(picture: Picture, table: list[int]) -> Picture:
  return picture.point(table * len(picture.getbands()))


def _posterize(picture: Picture, bits: int) -> Picture:
  """Keeps the highest bits; without any the image is black.

  Pillow's own function refuses 0 bits since version 12, but the magnitudes of
  the usual policies come to it.
  """
  if bits >= 8:
    return picture
  mask = 256 - 2 ** (8 - max(bits, 0))
  return _lookup(picture, [value & mask for value in range(256)])


def _solarize_add(picture: Picture, level: float, _: Any) -> Picture:
  add = min(128, int(level * 110))
  raised = [min(255, value + add) for value in range(_SOLARIZED)]
  return _lookup(picture, [*raised, *range(_SOLARIZED, 256)])


def _solarize_from(level: float) -> int:
  return min(256, int(level * 256))


def _enhanced(
  suffix: str, factor: Callable[[float], float], signed: bool
) -> dict[str, Operation]:
  """The operations of Pillow's enhancers, whose factor a level tells."""

  def operation(kind: Callable[[Picture], Any]) -> Operation:
    return Operation(
      lambda picture, level, _: kind(picture).enhance(factor(level)), signed
    )

  kinds = "Color", "Contrast", "Brightness", "Sharpness"
  return {f"{n}{suffix}": operation(getattr(ImageEnhance, n)) for n in kinds}


_ALWAYS = {
  "AutoContrast": Operation(lambda picture, *_: ImageOps.autocontrast(picture)),
  "Equalize": Operation(lambda picture, *_: ImageOps.equalize(picture)),
  "Invert": Operation(lambda picture, *_: ImageOps.invert(picture)),
  "Rotate": Operation(_rotate, signed=True),
  "SolarizeAdd": Operation(_solarize_add),
  "ShearX": Operation(_shear_x, signed=True),
  "ShearY": Operation(_shear_y, signed=True),
  "TranslateXRel": Operation(_move_x, signed=True),
  "TranslateYRel": Operation(_move_y, signed=True),
}
# Operations by the name that timm gives them. In the first set some change less
# at larger magnitudes, in the second ("inc1") none does.
PLAIN = _ALWAYS | {
  "Posterize": Operation(lambda x, level, _: _posterize(x, int(level * 4))),
  "Solarize": Operation(
    lambda x, level, _: ImageOps.solarize(x, _solarize_from(level))
  ),
  **_enhanced("", lambda level: level * 1.8 + 0.1, False),
}
INCREASING = _ALWAYS | {
  "PosterizeIncreasing": Operation(
    lambda x, level, _: _posterize(x, 4 - int(level * 4))
  ),
  "SolarizeIncreasing": Operation(
    lambda x, level, _: ImageOps.solarize(x, 256 - _solarize_from(level))
  ),
  **_enhanced("Increasing", lambda level: max(0.1, 1.0 + level * 0.9), True),
}
