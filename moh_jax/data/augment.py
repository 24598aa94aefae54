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

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from moh_jax.config.data import RandAugmentPolicy
from moh_jax.data.decode import to_array, to_picture

Picture = Image.Image
_LEVEL_UNIT = 10  # magnitude at which an argument is at the end of its range
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
_DRAWS = 1 << 16  # as many as a uint16 has values
_SOLARIZED = 128  # pixels below this are brightened by solarize_add


def rand_augment(
  image: np.ndarray,
  rng: np.random.Generator,
  policy: RandAugmentPolicy,
  fill: tuple[int, ...],
) -> np.ndarray:
  """Applies some of timm's fifteen operations (arXiv:1909.13719).

  Args:
    image: [X, Y, 1 or 3] uint8.
    rng: a generator.
    policy: how many, how strong and how often.
    fill: colour of what comes into view, one value per channel in [0, 255].
  """
  operations = tuple(OPERATIONS.values())
  chosen = rng.integers(len(operations), size=policy.layers)
  applied = chosen[rng.random(policy.layers) < policy.probability]
  picture, colour = to_picture(image), fill if len(fill) > 1 else fill[0]
  for index in applied:
    magnitude = float(policy.magnitude)
    if policy.spread:
      magnitude = rng.normal(magnitude, policy.spread)
    level = max(0.0, min(magnitude, policy.limit)) / _LEVEL_UNIT
    if operations[index].signed and rng.random() < 0.5:
      level = -level
    picture = operations[index].apply(picture, level, colour)
  return to_array(picture)


def random_erasing(
  image: np.ndarray,
  rng: np.random.Generator,
  probability: float,
  mean: tuple[float, ...],
  std: tuple[float, ...],
) -> np.ndarray:
  """Fills a random box with noise (arXiv:1708.04896), timm's mode "pixel".

  The box has 2 % to a third of the area, and height over width between 0.3 and
  1 / 0.3. Noise is standard normal in normalized units, as timm's, but here it
  is rounded and cut off at black and white: an image is bytes until the step.

  Args:
    image: [X, Y, channels] uint8.
    rng: a generator.
    probability: of an image to be changed.
    mean: of the normalization, one value per channel.
    std: of the normalization, above 0.
  """
  if rng.random() >= probability:
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
  for channel, of_channel in enumerate(zip(mean, std)):
    draws = rng.integers(_DRAWS, size=(height, width), dtype=np.uint16)
    erased[..., channel] = _normal_pixels(*of_channel)[draws]
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


def _posterize(picture: Picture, level: float, _: Any) -> Picture:
  """Keeps the highest 4 bits, or fewer; without any the image is black.

  Pillow's own function refuses 0 bits since version 12, but the magnitudes of
  the usual policies come to it.
  """
  mask = 256 - 2 ** (8 - max(4 - int(level * 4), 0))
  return _lookup(picture, [value & mask for value in range(256)])


def _solarize_add(picture: Picture, level: float, _: Any) -> Picture:
  add = min(128, int(level * 110))
  raised = [min(255, value + add) for value in range(_SOLARIZED)]
  return _lookup(picture, [*raised, *range(_SOLARIZED, 256)])


def _solarize(picture: Picture, level: float, _: Any) -> Picture:
  return ImageOps.solarize(picture, 256 - min(256, int(level * 256)))


def _enhanced(name: str) -> Operation:
  """An operation of Pillow's enhancers."""
  kind = getattr(ImageEnhance, name)

  def apply(picture: Picture, level: float, _: Any) -> Picture:
    return kind(picture).enhance(max(0.1, 1.0 + level * 0.9))

  return Operation(apply, signed=True)


# By the names that timm gives them. With "inc1", none changes less at larger
# magnitudes.
OPERATIONS = {
  "AutoContrast": Operation(lambda picture, *_: ImageOps.autocontrast(picture)),
  "Equalize": Operation(lambda picture, *_: ImageOps.equalize(picture)),
  "Invert": Operation(lambda picture, *_: ImageOps.invert(picture)),
  "Rotate": Operation(_rotate, signed=True),
  "SolarizeAdd": Operation(_solarize_add),
  "ShearX": Operation(_shear_x, signed=True),
  "ShearY": Operation(_shear_y, signed=True),
  "TranslateXRel": Operation(_move_x, signed=True),
  "TranslateYRel": Operation(_move_y, signed=True),
  "PosterizeIncreasing": Operation(_posterize),
  "SolarizeIncreasing": Operation(_solarize),
  "ColorIncreasing": _enhanced("Color"),
  "ContrastIncreasing": _enhanced("Contrast"),
  "BrightnessIncreasing": _enhanced("Brightness"),
  "SharpnessIncreasing": _enhanced("Sharpness"),
}
