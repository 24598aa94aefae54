"""Random-access sources of labelled images.

A source has `len()`, `source[i]` = {"image": [X, Y, channels] uint8, "label":
int32}, `class_names` and `channels`.
"""

import functools
import os
import warnings
from typing import Any, Protocol

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

from moh_jax.config import DataConfig, ViTConfig

SPLITS = ("train", "val")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


class ImageSource(Protocol):
  """What the pipelines read."""

  class_names: tuple[str, ...]
  channels: int

  def __len__(self) -> int:
    """Number of examples."""

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One example: "image" [X, Y, channels] uint8 and "label" int32."""


class DigitsSource:
  """Scikit-learn's handwritten digits: 1,797 scans of 8 x 8 pixels, 16 greys.

  The held-out split is a fixed fifth (359 scans), the same in every run.
  """

  class_names = tuple(str(digit) for digit in range(10))
  channels = 1

  def __init__(self, split: str):
    images, labels = _load_digits()
    order = np.random.RandomState(0).permutation(len(labels))
    held_out = round(len(labels) / 5)
    self._index = order[:held_out] if split == "val" else order[held_out:]
    self._images, self._labels = images, labels

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._index[index]
    return {"image": self._images[row], "label": self._labels[row]}


@functools.cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
  from sklearn import datasets  # slow to import, only this source needs it

  digits = datasets.load_digits()
  images = np.round(digits.images * (255 / 16)).astype(np.uint8)
  return images[..., None], digits.target.astype(np.int32)


class ImageFolderSource:
  """Images in path/SPLIT/CLASS/*, classes in alphabetical order."""

  def __init__(self, path: str, split: str, channels: int):
    root = epath.Path(path) / split
    if not root.is_dir():
      raise FileNotFoundError(
        f"data.path={path!r} has no directory {split!r}; expected "
        f"{path}/{split}/CLASS/*.jpg"
      )
    folders = sorted(
      entry
      for entry in root.iterdir()
      if entry.is_dir() and not entry.name.startswith(".")
    )
    self.class_names = tuple(folder.name for folder in folders)
    self.channels = channels
    self._files = [
      (os.fspath(file), label)
      for label, folder in enumerate(folders)
      for file in sorted(folder.iterdir())
      if file.suffix.lower() in _SUFFIXES
    ]
    if not self._files:
      raise FileNotFoundError(
        f"{root} holds no image; expected {root}/CLASS/* with a suffix in "
        f"{_SUFFIXES}"
      )

  def __len__(self) -> int:
    return len(self._files)

  def __getitem__(self, index: int) -> dict[str, Any]:
    file, label = self._files[index]
    return {"image": read_image(file, self.channels), "label": np.int32(label)}


class FakeSource:
  """Random images and labels, a function of the index alone."""

  def __init__(self, split: str, examples: int, model: ViTConfig):
    self.class_names = tuple(str(i) for i in range(model.num_classes))
    self.channels = model.channels
    self._shape = (*model.image_size, model.channels)
    self._seed = SPLITS.index(split)
    self._examples = examples

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    rng = np.random.default_rng((self._seed, index))
    image = rng.integers(0, 256, self._shape, np.uint8)
    label = np.int32(rng.integers(len(self.class_names)))
    return {"image": image, "label": label}


def make_source(data: DataConfig, model: ViTConfig, split: str) -> ImageSource:
  """Opens one split of the configured source.

  Args:
    data: the data section.
    model: the model that will read the images.
    split: "train" or "val".

  Raises:
    FileNotFoundError: a directory is missing or empty.
    ValueError: classes or channels do not fit the model.
  """
  if split not in SPLITS:
    raise ValueError(f"split={split!r} must be one of {SPLITS}")
  if data.source == "digits":
    source = DigitsSource(split)
  elif data.source == "image_folder":
    source = ImageFolderSource(data.path, split, model.channels)
  else:
    source = FakeSource(split, data.fake_examples, model)
  if len(source.class_names) != model.num_classes:
    raise ValueError(
      f"model.num_classes={model.num_classes} must be the "
      f"{len(source.class_names)} classes of data.source={data.source!r}"
    )
  if source.channels != model.channels:
    raise ValueError(
      f"model.channels={model.channels} must be the {source.channels} of "
      f"data.source={data.source!r}"
    )
  return source


def check_class_names(
  ours: tuple[str, ...], theirs: tuple[str, ...], where: str
) -> None:
  """Refuses labels that mean different classes.

  Args:
    ours: names of the model's outputs.
    theirs: names of the data's classes.
    where: the data, for the message.

  Raises:
    ValueError: a name differs.
  """
  for label, (mine, other) in enumerate(zip(ours, theirs)):
    if mine != other:
      raise ValueError(
        f"{where}: class {label} is {other!r}, the model's is {mine!r}; class "
        "directories must have the names of the training split"
      )


def read_image(file: str | os.PathLike, channels: int) -> np.ndarray:
  """Reads one image file in any format Pillow knows.

  Args:
    file: path, local or of a bucket.
    channels: 1 converts to grey, 3 to RGB.

  Returns:
    [X, Y, channels] uint8.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is no image, or a truncated one.
  """
  modes = {1: "L", 3: "RGB"}
  if channels not in modes:
    raise ValueError(
      f"image files have 1 or 3 channels, the model has {channels}"
    )
  path = epath.Path(file)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such image file")
  try:
    with warnings.catch_warnings():
      # Pillow's remarks on odd files: what matters is raised.
      warnings.simplefilter("ignore", UserWarning)
      with path.open("rb") as stream, Image.open(stream) as image:
        pixels = np.asarray(_to_8_bits(image).convert(modes[channels]))
  except UnidentifiedImageError as error:
    raise ValueError(f"{path}: not an image that Pillow can read") from error
  except (OSError, SyntaxError, Image.DecompressionBombError) as error:
    raise ValueError(f"{path}: damaged or truncated image: {error}") from error
  return pixels.reshape(*pixels.shape[:2], channels)


def _to_8_bits(image: Image.Image) -> Image.Image:
  """Scales 16-bit greys, which Pillow's `convert` would clip to white."""
  if not image.mode.startswith("I"):
    return image
  pixels = np.clip(np.asarray(image), 0, 65535)
  return Image.fromarray(np.round(pixels / 257).astype(np.uint8))
