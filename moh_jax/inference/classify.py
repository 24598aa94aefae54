"""Class probabilities of images, from files or from memory."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from PIL import Image

from moh_jax.config import Config, check_command
from moh_jax.data.decode import read_image, to_picture, to_pixels
from moh_jax.data.transforms import eval_fit, normalizer
from moh_jax.runtime.parameters import check_finite

# A path, a picture, or [X, Y] or [X, Y, channels] uint8.
ImageLike = str | os.PathLike | Image.Image | np.ndarray


@dataclasses.dataclass(frozen=True)
class Prediction:
  """One class of one image.

  Attributes:
    label: class index.
    name: class name, or the index as text where the checkpoint has no names.
    probability: softmax probability.
  """

  label: int
  name: str
  probability: float


def classify(
  model: nn.Module,
  params: Any,
  config: Config,
  images: Sequence[ImageLike] | ImageLike,
  *,
  class_names: Sequence[str] = (),
  top: int = 5,
  batch_size: int = 32,
) -> list[list[Prediction]]:
  """Classifies images; all are read and checked before the model runs.

  Images go through the transforms of the run's evaluation: channels, size and
  normalization are the config's.

  Args:
    model: maps images [B, X, Y, channels] to (logits [B, classes], aux).
    params: its parameters.
    config: the run.
    images: paths, Pillow images or uint8 arrays [X, Y] or [X, Y, 1] (grey)
      or [X, Y, 3] (RGB), mixed at will and of any size, which are converted
      to the model's channels; or one uint8 array [B, X, Y, channels]. One
      image is as a list of it.
    class_names: of the outputs; () names them by their index.
    top: classes per image, most probable first.
    batch_size: images at a time. Fewer are filled up to a power of two, so
      that few numbers of images need a compilation of their own.

  Returns:
    Per image, its `top` predictions (fewer if the model has fewer classes).

  Raises:
    FileNotFoundError: a file does not exist.
    FloatingPointError: the model gives NaN.
    ValueError: the model classifies no images, a file is no image or a damaged
      one, or an array is not uint8 or no such picture.
  """
  check_command(config.model, "classify", "the checkpoint")
  if isinstance(images, ImageLike) and np.ndim(images) != 4:
    images = [images]
  fit = eval_fit(config.data, config.model)
  normalize = normalizer(config.data)
  ready = [
    fit(_pixels(i, image, config.model.channels))
    for i, image in enumerate(images)
  ]
  rows: list[np.ndarray] = []
  size = min(batch_size, 1 << max(0, len(ready) - 1).bit_length())
  for start in range(0, len(ready), size):
    part = ready[start : start + size]
    batch = {"image": np.stack(part + part[:1] * (size - len(part)))}
    found = _probabilities(model, params, normalize(batch)["image"])
    check_finite(found, "the model's probabilities of classes")
    rows += list(np.asarray(found))
  names = class_names or [str(i) for i in range(config.model.num_classes)]
  return [
    [
      Prediction(int(i), names[i], float(row[i]))
      for i in np.argsort(-row, kind="stable")[:top]
    ]
    for row in rows[: len(ready)]
  ]


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(model: nn.Module, params: Any, images: Any) -> jax.Array:
  return jax.nn.softmax(model.apply({"params": params}, images)[0])


def _pixels(index: int, image: ImageLike, channels: int) -> np.ndarray:
  """An image as [X, Y, channels] uint8."""
  if isinstance(image, str | os.PathLike):
    return read_image(image, channels)
  if isinstance(image, Image.Image):
    return to_pixels(image, channels)
  pixels = np.asarray(image)
  if pixels.ndim == 2:
    pixels = pixels[..., None]
  known = pixels.ndim == 3 and pixels.shape[-1] in (1, 3, channels)
  if pixels.dtype != np.uint8 or not pixels.size or not known:
    raise ValueError(
      f"image {index} of {pixels.dtype} and shape {pixels.shape} must be uint8 "
      f"[X, Y, {channels}] in [0, 255], or a picture [X, Y] or [X, Y, 1] in "
      "grey, [X, Y, 3] in RGB; normalization is done here"
    )
  if pixels.shape[-1] != channels:
    return to_pixels(to_picture(pixels), channels)
  return pixels
