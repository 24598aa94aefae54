"""Image transforms: functions of an image, and for random ones of a generator.

Images are [X, Y, 1 or 3] uint8 until `normalizer` makes them float32 on the
device, so that bytes cross to it. The operations of RandAugment have the pixels
of timm 1.0.31: what a magnitude means, signs, bicubic resampling, the colour of
what comes into view.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from moh_jax.config.data import DataConfig, RandAugmentPolicy, parse_policy
from moh_jax.config.dit import LatentScaling
from moh_jax.config.layers import ImageModel
from moh_jax.data.decode import resize, to_array, to_picture
from moh_jax.data.sources import Example

_AREA = (0.08, 1.0)  # of a random crop, over the image's
_ASPECT = (3 / 4, 4 / 3)  # its width over its height
Picture = Image.Image
_LEVEL_UNIT = 10  # magnitude at which an argument is at the end of its range
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
_DRAWS = 1 << 16  # as many as a uint16 has values
_SOLARIZED = 128  # pixels below this are brightened by solarize_add


@dataclasses.dataclass(frozen=True)
class Change(grain.transforms.Map):
  """Maps "image" of an example by a function."""

  function: Callable[[np.ndarray], np.ndarray]

  def map(self, element: Example) -> Example:
    """Changes one example."""
    return {**element, "image": self.function(element["image"])}


@dataclasses.dataclass(frozen=True)
class RandomChange(grain.transforms.RandomMap):
  """Maps "image" of an example by a function of it and of a generator."""

  function: Callable[[np.ndarray, np.random.Generator], np.ndarray]

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Changes one example."""
    return {**element, "image": self.function(element["image"], rng)}


def resize_center_crop(
  image: np.ndarray, shorter: int, size: tuple[int, int]
) -> np.ndarray:
  """Resizes the shorter side to `shorter` pixels, then crops the centre.

  The pixels are those of torchvision's `Resize` and `CenterCrop` on pictures of
  Pillow, within 0.25 of 255 levels on average: only those of the crop are
  computed. An image that the crop would not fit into is enlarged until it does.
  """
  sides = image.shape[:2]
  least = min(sides)
  covering = (w * least / side for side, w in zip(sides, size))
  shorter = max(shorter, *covering)
  edges = []
  for side, wanted in zip(sides, size):
    scaled = max(int(shorter * side / least), wanted)
    start = round((scaled - wanted) / 2)  # of halves, the even one
    step = side / scaled  # pixels of the image to one of the scaled one
    edges.append((start * step, min((start + wanted) * step, side)))
  (upper, lower), (left, right) = edges
  return resize(image, size, (left, upper, right, lower))


def center_crop(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """ADM's centre crop (arXiv:2105.05233), which DiT and its FID use.

  Halves the image with a box filter while both sides have at least twice the
  wanted size, then resizes it bicubically until it just covers that size, and
  crops the centre. Smaller images are enlarged.

  Args:
    image: [X, Y, channels] uint8.
    size: rows and columns of the result.

  Returns:
    [*size, channels] uint8.
  """
  while all(s >= 2 * wanted for s, wanted in zip(image.shape, size)):
    halves = (image.shape[0] // 2, image.shape[1] // 2)
    image = resize(image, halves, resample=Image.Resampling.BOX)
  sides = [*zip(image.shape, size)]
  scale = max(wanted / s for s, wanted in sides)
  scaled = tuple(max(round(s * scale), wanted) for s, wanted in sides)
  image = resize(image, scaled)
  top, left = ((s - wanted) // 2 for s, wanted in zip(scaled, size))
  return image[top : top + size[0], left : left + size[1]]


def random_flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Mirrors an image left to right with probability 1/2."""
  return image[:, ::-1] if rng.random() < 0.5 else image


def random_shift(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Pads each side by an eighth of it (at least 1 pixel), crops at random."""
  rows, columns = image.shape[:2]
  pads = [max(1, side // 8) for side in (rows, columns)]
  padded = np.pad(image, [(p, p) for p in pads] + [(0, 0)])
  top, left = (int(rng.integers(2 * p + 1)) for p in pads)
  return padded[top : top + rows, left : left + columns]


def random_crop_flip(
  image: np.ndarray, rng: np.random.Generator, size: tuple[int, int]
) -> np.ndarray:
  """Random resized crop (arXiv:1409.4842) and random horizontal flip."""
  image = resize(image, size, _random_box(image.shape[:2], rng))
  return random_flip(image, rng)


def _random_box(shape: tuple[int, int], rng: np.random.Generator) -> tuple:
  """Samples the crop (left, upper, right, lower) of an image."""
  rows, columns = shape
  for _ in range(10):
    area = rows * columns * rng.uniform(*_AREA)
    ratio = np.exp(rng.uniform(*np.log(_ASPECT)))
    width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
    if 0 < width <= columns and 0 < height <= rows:
      left = int(rng.integers(columns - width + 1))
      top = int(rng.integers(rows - height + 1))
      return left, top, left + width, top + height
  side = min(rows, columns)  # ten crops did not fit: take the centre square
  left, top = (columns - side) // 2, (rows - side) // 2
  return left, top, left + side, top + side


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


def _affine(matrix: Callable[[float, Picture], tuple[float, ...]]) -> Operation:
  """A shift or shear by what `matrix` makes of a level and an image."""

  def apply(picture: Picture, level: float, fill: Any) -> Picture:
    how = {"resample": Image.Resampling.BICUBIC, "fillcolor": fill}
    affine, values = Image.Transform.AFFINE, matrix(level, picture)
    return picture.transform(picture.size, affine, values, **how)

  return Operation(apply, signed=True)


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
  "ShearX": _affine(lambda x, _: (1, x * 0.3, 0, 0, 1, 0)),
  "ShearY": _affine(lambda x, _: (1, 0, 0, x * 0.3, 1, 0)),
  "TranslateXRel": _affine(lambda x, p: (1, 0, x * 0.45 * p.width, 0, 1, 0)),
  "TranslateYRel": _affine(lambda x, p: (1, 0, 0, 0, 1, x * 0.45 * p.height)),
  "PosterizeIncreasing": Operation(_posterize),
  "SolarizeIncreasing": Operation(_solarize),
  "ColorIncreasing": _enhanced("Color"),
  "ContrastIncreasing": _enhanced("Contrast"),
  "BrightnessIncreasing": _enhanced("Brightness"),
  "SharpnessIncreasing": _enhanced("Sharpness"),
}


def normalizer(data: Any) -> Callable[[Any], Any]:
  """Makes the function that normalizes the pixels of a batch.

  Args:
    data: section `data` of the config.

  Returns:
    Maps batches {"image": [B, X, Y, channels] uint8, ...} to the same with
    float32 images, (pixel / 255 - mean) / std per channel. Other batches (text,
    latents, images that are float32 already) stay as they are.
  """
  if getattr(data, "mean", None) is None:
    return lambda batch: batch
  mean, std = (np.float32([[[x]]]) for x in (data.mean, data.std))

  def normalize(batch: dict[str, Any]) -> dict[str, Any]:
    image = batch["image"]
    if image.dtype != jnp.uint8:
      return batch
    image = image.astype(jnp.float32) / 255
    return {**batch, "image": (image - mean) / std}

  return jax.jit(normalize)


def sample_posterior(
  mean: np.ndarray, log_variance: np.ndarray, noise: np.ndarray
) -> np.ndarray:
  """Samples latents: mean + exp(log_variance / 2) * noise, all of one shape."""
  return mean + np.exp(0.5 * log_variance) * noise


def sample_latent(
  moments: np.ndarray, rng: np.random.Generator, scaling: LatentScaling
) -> np.ndarray:
  """Samples a latent from the posterior of an image or of its mirror image.

  Args:
    moments: [2, 2, X, Y, channels], see `packed.py`.
    rng: a generator.
    scaling: of the latents.

  Returns:
    [X, Y, channels] float32.
  """
  mean, log_variance = moments[int(rng.random() < 0.5)].astype(np.float32)
  noise = rng.standard_normal(mean.shape, np.float32)
  return _scaled(sample_posterior(mean, log_variance, noise), scaling)


def mean_latent(moments: np.ndarray, scaling: LatentScaling) -> np.ndarray:
  """As `sample_latent`, but the mean of the image that is not mirrored."""
  return _scaled(moments[0, 0].astype(np.float32), scaling)


def _scaled(latent: np.ndarray, scaling: LatentScaling) -> np.ndarray:
  parts = scaling.affine(latent.shape[-1])
  offset, factor = (np.asarray(part, np.float32) for part in parts)
  return (latent - offset) * factor


def train_transforms(data: DataConfig, model: ImageModel) -> list:
  """The transforms of training images, in order; pixels stay uint8.

  Further changes follow crop and flip in timm's order.
  """
  size = model.input_shape[:2]
  recipe: list = [Change(functools.partial(resize, size=size))]
  if data.augment == "center_flip":
    crop = Change(functools.partial(center_crop, size=size))
    recipe = [crop, RandomChange(random_flip)]
  elif data.augment == "crop_flip":
    recipe = [RandomChange(functools.partial(random_crop_flip, size=size))]
  elif data.augment == "shift":
    recipe.append(RandomChange(random_shift))
  if policy := parse_policy(data.auto_augment):
    fill = tuple(min(255, round(255 * value)) for value in data.mean or ())
    change = functools.partial(rand_augment, policy=policy, fill=fill)
    recipe.append(RandomChange(change))
  if share := data.random_erasing:
    how = {"probability": share, "mean": data.mean, "std": data.std}
    recipe.append(RandomChange(functools.partial(random_erasing, **how)))
  return recipe


def eval_fit(
  data: DataConfig, model: ImageModel
) -> Callable[[np.ndarray], np.ndarray]:
  """What fits a classifier's held-out images, also for `classify`."""
  size = model.input_shape[:2]
  if data.augment == "center_flip":
    return functools.partial(center_crop, size=size)
  if shorter := data.eval_resize:
    return functools.partial(resize_center_crop, shorter=shorter, size=size)
  return functools.partial(resize, size=size)
