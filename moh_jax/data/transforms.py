"""Image transforms: picklable classes that map {"image", "label"} examples.

Images are [X, Y, channels] uint8 until `normalizer` makes them float32 on the
device, so that bytes cross to it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from moh_jax.config import DataConfig, ImageModel
from moh_jax.config.dit import LatentScaling
from moh_jax.data.augment import augmentations
from moh_jax.data.decode import resize
from moh_jax.data.sources import Example


@dataclasses.dataclass(frozen=True)
class Resize(grain.transforms.Map):
  """Resizes to `size` (rows, columns), whatever the aspect ratio."""

  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes one example."""
    return {**element, "image": resize(element["image"], self.size)}


@dataclasses.dataclass(frozen=True)
class ResizeCenterCrop(grain.transforms.Map):
  """Resizes the shorter side to `shorter` pixels, then crops the centre.

  The pixels are those of torchvision's `Resize` and `CenterCrop` on pictures of
  Pillow, within 0.25 of 255 levels on average: only those of the crop are
  computed. An image that the crop would not fit into is enlarged until it does.
  """

  shorter: int
  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes and crops one example."""
    image = element["image"]
    sides = image.shape[:2]
    least = min(sides)
    covering = (w * least / side for side, w in zip(sides, self.size))
    shorter = max(self.shorter, *covering)
    edges = []
    for side, wanted in zip(sides, self.size):
      scaled = max(int(shorter * side / least), wanted)
      start = round((scaled - wanted) / 2)  # of halves, the even one
      step = side / scaled  # pixels of the image to one of the scaled one
      edges.append((start * step, min((start + wanted) * step, side)))
    (upper, lower), (left, right) = edges
    box = left, upper, right, lower
    return {**element, "image": resize(image, self.size, box)}


@dataclasses.dataclass(frozen=True)
class CenterCrop(grain.transforms.Map):
  """ADM's centre crop (arXiv:2105.05233), which DiT and its FID use.

  Halves the image with a box filter while both sides have at least twice the
  wanted size, then resizes it bicubically until it just covers that size, and
  crops the centre. Smaller images are enlarged.
  """

  size: tuple[int, int]

  def map(self, element: Example) -> Example:
    """Resizes and crops one example."""
    return {**element, "image": center_crop(element["image"], self.size)}


def center_crop(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Crops the centre of an image as `CenterCrop` describes.

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
  """Mirrors an image left to right with probability 1/2."""

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Mirrors one example or leaves it."""
    if rng.random() < 0.5:
      return {**element, "image": element["image"][:, ::-1]}
    return element


@dataclasses.dataclass(frozen=True)
class RandomShift(grain.transforms.RandomMap):
  """Pads each side by an eighth of it (at least 1 pixel), crops at random."""

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
  """Random resized crop (arXiv:1409.4842) and random horizontal flip.

  Attributes:
    size: rows and columns of the result.
    area: smallest and largest area of a crop over the image's area.
    aspect: smallest and largest width over height of a crop.
  """

  size: tuple[int, int]
  area: tuple[float, float] = (0.08, 1.0)
  aspect: tuple[float, float] = (3 / 4, 4 / 3)

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Crops, resizes and flips one example."""
    image = element["image"]
    box = self._box(image.shape[:2], rng)
    image = resize(image, self.size, box)
    if rng.random() < 0.5:
      image = image[:, ::-1]
    return {**element, "image": image}

  def _box(self, shape: tuple[int, int], rng: np.random.Generator) -> tuple:
    """Samples the crop (left, upper, right, lower) of an image."""
    rows, columns = shape
    for _ in range(10):
      area = rows * columns * rng.uniform(*self.area)
      ratio = np.exp(rng.uniform(*np.log(self.aspect)))
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


@dataclasses.dataclass(frozen=True)
class SampleLatent(grain.transforms.RandomMap):
  """Samples a latent from the posterior of the image or of its mirror image."""

  scaling: LatentScaling

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    """Maps "image" [2, 2, X, Y, channels] to [X, Y, channels] float32."""
    mirrored = int(rng.random() < 0.5)
    mean, log_variance = element["image"][mirrored].astype(np.float32)
    noise = rng.standard_normal(mean.shape, np.float32)
    latent = sample_posterior(mean, log_variance, noise)
    return {**element, "image": _scaled(latent, self.scaling)}


@dataclasses.dataclass(frozen=True)
class MeanLatent(grain.transforms.Map):
  """Takes the posterior's mean of the image that is not mirrored."""

  scaling: LatentScaling

  def map(self, element: Example) -> Example:
    """Maps "image" [2, 2, X, Y, channels] to [X, Y, channels] float32."""
    mean = element["image"][0, 0].astype(np.float32)
    return {**element, "image": _scaled(mean, self.scaling)}


def _scaled(latent: np.ndarray, scaling: LatentScaling) -> np.ndarray:
  parts = scaling.affine(latent.shape[-1])
  offset, factor = (np.asarray(part, np.float32) for part in parts)
  return (latent - offset) * factor


def train_transforms(data: DataConfig, model: ImageModel) -> list:
  """The transforms of training images, in order; pixels stay uint8."""
  size = model.input_shape[:2]
  fit: list = [Resize(size)]
  if data.augment == "center_flip":
    fit = [CenterCrop(size), RandomFlip()]
  elif data.augment == "crop_flip":
    fit = [RandomCropFlip(size)]
  elif data.augment == "shift":
    fit.append(RandomShift())
  return [*fit, *augmentations(data)]


def eval_fit(data: DataConfig, model: ImageModel) -> Any:
  """What fits a classifier's held-out images, also for `classify`."""
  size = model.input_shape[:2]
  if data.augment == "center_flip":
    return CenterCrop(size)
  if data.eval_resize:
    return ResizeCenterCrop(data.eval_resize, size)
  return Resize(size)
