"""Images without a download: handwritten digits, and random images."""

import functools
import importlib.util
import os
from collections.abc import Collection
from typing import Any

import numpy as np

from moh_jax.config import Config
from moh_jax.config.registry import SPLITS
from moh_jax.data.sources import Example, ImageSource, Names, is_latent

_DIGITS_SIDE = 32  # of inputs, which every stage can halve
_FAKE_CLASSES, _FAKE_SIDE = 1000, 224  # the usual ones


class DigitsSource(ImageSource):
  """Scikit-learn's handwritten digits: 1,797 scans, 8 x 8 pixels, 16 greys.

  The held-out split is a fixed fifth of them, 359 scans.
  """

  class_names = tuple(str(digit) for digit in range(10))
  channels = 1

  def __init__(self, config: Config, split: str, class_names: Names = ()):
    """Opens a split, the same for all configs; see `open`."""
    images, labels = _load_digits()
    order = np.random.RandomState(0).permutation(len(labels))
    held_out = round(len(labels) / 5)
    index = order[:held_out] if split == "val" else order[held_out:]
    self._images, self._labels = images[index], labels[index]

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """All fields; mean and standard deviation are the training scans'."""
    told = {"channels": 1, "num_classes": 10, "image_size": (_DIGITS_SIDE,) * 2}
    return {**told, "mean": (0.3,), "std": (0.37,)}

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> Example:
    return {"image": self._images[index], "label": self._labels[index]}


@functools.cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
  # Scikit-learn's file of 64 pixels and a label a row; importing it is slow.
  package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
  file = os.path.join(package, "datasets", "data", "digits.csv.gz")
  table = np.loadtxt(file, delimiter=",")
  images = table[:, :-1].reshape(-1, 8, 8, 1)
  pixels = np.round(images * (255 / 16)).astype(np.uint8)
  return pixels, table[:, -1].astype(np.int32)


class FakeSource(ImageSource):
  """Random images (or latents) and labels; example i is the same in every run.

  Pixels are uniform, latents are standard normal.
  """

  def __init__(self, config: Config, split: str, class_names: Names = ()):
    """Prepares a split, of what the model reads; see `open`."""
    model = config.model
    self.class_names = class_names or tuple(map(str, range(model.num_classes)))
    self.channels, self._shape = model.channels, model.input_shape
    self._seed, self._latent = SPLITS.index(split), is_latent(config)
    self._examples = config.data.fake_examples

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The shapes of the usual images or latents."""
    return {
      "channels": 4 if is_latent(config) else 3,
      "num_classes": _FAKE_CLASSES,
      "image_size": (_FAKE_SIDE,) * 2,
    }

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> Example:
    rng = np.random.default_rng((self._seed, index))
    if self._latent:
      image = rng.standard_normal(self._shape, np.float32)
    else:
      image = rng.integers(0, 256, self._shape, np.uint8)
    label = np.int32(rng.integers(len(self.class_names)))
    return {"image": image, "label": label}
