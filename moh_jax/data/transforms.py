"""Image transforms: functions of an image, and for random ones of a generator.

Images are [X, Y, channels] uint8 until `normalizer` makes them float32 on the
device, so that bytes cross to it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from moh_jax.config import DataConfig, ImageModel
from moh_jax.config.data import parse_policy
from moh_jax.config.dit import LatentScaling
from moh_jax.data.augment import rand_augment, random_erasing
from moh_jax.data.decode import resize
from moh_jax.data.sources import Example

_AREA = (0.08, 1.0)  # of a random crop, over the image's
_ASPECT = (3 / 4, 4 / 3)  # its width over its height


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
  scale = max(wanted / s for s, wanted in zip(image.shape, size))
  scaled = tuple(
    max(round(s * scale), wanted) for s, wanted in zip(image.shape, size)
  )
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
  if data.random_erasing:
    how = {"probability": data.random_erasing, "mean": data.mean}
    change = functools.partial(random_erasing, **how, std=data.std)
    recipe.append(RandomChange(change))
  return recipe


def eval_fit(
  data: DataConfig, model: ImageModel
) -> Callable[[np.ndarray], np.ndarray]:
  """What fits a classifier's held-out images, also for `classify`."""
  size = model.input_shape[:2]
  if data.augment == "center_flip":
    return functools.partial(center_crop, size=size)
  if data.eval_resize:
    how = {"shorter": data.eval_resize, "size": size}
    return functools.partial(resize_center_crop, **how)
  return functools.partial(resize, size=size)
