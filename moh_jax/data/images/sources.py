"""Random-access sources of labelled images.

A source has a length, the attributes `class_names` and `channels`, and examples
`source[i]` = {"image": [X, Y, channels] uint8, "label": int32}. In sources of
latents "image" is the stored posterior, see `latents.py`.
"""

import functools
import logging
from typing import Any, Protocol

import numpy as np
from etils import epath

from moh_jax.config import Config, ImageModel
from moh_jax.data.identity import Identity
from moh_jax.data.images.files import (
  SPLITS,
  decode_image,
  fingerprint,
  list_images,
  read_bytes,
)
from moh_jax.data.images.latents import LatentSource
from moh_jax.data.images.recipes import crops_center, is_latent
from moh_jax.data.images.records import ArrayRecordSource
from moh_jax.data.images.tolerant import CheckedSource

_LOG = logging.getLogger(__name__)


class ImageSource(Protocol):
  """A source of labelled images, as the pipelines read it."""

  class_names: tuple[str, ...]
  channels: int

  def __len__(self) -> int:
    """Number of examples."""

  def identity(self) -> Identity:
    """What identifies the examples and their order."""

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns {"image": [X, Y, channels] uint8, "label": int32}."""


class DigitsSource:
  """Scikit-learn's handwritten digits: 1,797 scans, 8 x 8 pixels, 16 greys.

  The held-out split is a fixed fifth of them, 359 scans.
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

  def identity(self) -> Identity:
    """The number of the examples, which are the same in every run."""
    return {"examples": len(self)}

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
  """Source of the image files PATH/SPLIT/CLASS/*; labels are alphabetical."""

  def __init__(self, path: str, split: str, channels: int):
    """Lists the files of a split.

    Args:
      path: directory of the splits, local or a bucket.
      split: "train" or "val"; "" reads `path` itself.
      channels: 1 converts to grey, 3 to RGB.

    Raises:
      FileNotFoundError: there is no such directory, or no image in it.
    """
    self._root = epath.Path(path) / split
    if not self._root.is_dir():
      raise FileNotFoundError(
        f"data.path={path!r} has no directory {split!r}; expected "
        f"{path}/{split}/CLASS/*.jpg"
      )
    self.class_names, self._files = list_images(self._root)
    self.channels = channels

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images, see `files.fingerprint`."""
    return fingerprint(self._files)

  def __len__(self) -> int:
    return len(self._files)

  def identity(self) -> Identity:
    """Identifies the list of images; their content is not read."""
    return {"examples": len(self), "fingerprint": self.fingerprint}

  def read(self, index: int) -> bytes:
    """The file of an example, not decoded."""
    return read_bytes(self._root / self._files[index][0])

  def __getitem__(self, index: int) -> dict[str, Any]:
    name, label = self._files[index]
    path = str(self._root / name)
    image = decode_image(self.read(index), self.channels, path)
    return {"image": image, "label": np.int32(label)}

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"."""
    return self._files[index][0]


class FakeSource:
  """Random images (or latents) and labels; example i is the same in every run.

  Pixels are uniform, latents are standard normal.
  """

  def __init__(
    self,
    split: str,
    examples: int,
    model: ImageModel,
    *,
    latent: bool = False,
  ):
    self.class_names = tuple(str(i) for i in range(model.num_classes))
    self.channels = model.channels
    self._shape = model.input_shape
    self._seed = SPLITS.index(split)
    self._examples = examples
    self._latent = latent

  def __len__(self) -> int:
    return self._examples

  def identity(self) -> Identity:
    """The number of the examples, which are the same in every run."""
    return {"examples": len(self)}

  def __getitem__(self, index: int) -> dict[str, Any]:
    rng = np.random.default_rng((self._seed, index))
    if self._latent:
      image = rng.standard_normal(self._shape, np.float32)
    else:
      image = rng.integers(0, 256, self._shape, np.uint8)
    label = np.int32(rng.integers(len(self.class_names)))
    return {"image": image, "label": label}


def has_split(config: Config, split: str) -> bool:
  """Whether the data has a split: its folder exists, complete or not."""
  path = config.data.path
  return not path or (epath.Path(path) / split).exists()


def make_source(config: Config, split: str) -> ImageSource:
  """Opens one split of the configured source.

  `data.bad_images` decides what happens to unreadable images of the training
  split. In the held-out split they always raise: metrics on fewer images could
  not be compared.

  Args:
    config: config of the run.
    split: "train" or "val".

  Raises:
    FileNotFoundError: a directory, metadata.json or a shard is missing.
    ValueError: the data is damaged or does not fit the model.
  """
  if split not in SPLITS:
    raise ValueError(f"split={split!r} must be one of {SPLITS}")
  data, model = config.data, config.model
  if data.source == "digits":
    source = DigitsSource(split)
  elif data.source == "image_folder":
    source = ImageFolderSource(data.path, split, model.channels)
  elif data.source == "array_record":
    source = ArrayRecordSource(data.path, split, model.channels)
  elif data.source == "latents":
    source = LatentSource(data.path, split)
    source.check_fits(config)
  else:
    source = FakeSource(
      split, data.fake_examples, model, latent=is_latent(config)
    )
  where = f"{data.path or data.source}, {split}:"
  if (found := len(source.class_names)) != model.num_classes:
    names = ", ".join(source.class_names[:10]) + ", ..." * (found > 10)
    raise ValueError(
      f"{where} {found} classes ({names}), must be model.num_classes="
      f"{model.num_classes}"
    )
  if source.channels != model.channels:
    raise ValueError(
      f"{where} images of {source.channels} channels, must be "
      f"model.channels={model.channels}"
    )
  _LOG.info(
    "data: %s, %s: %s examples of %d classes",
    data.path or data.source,
    split,
    f"{len(source):,}",
    len(source.class_names),
  )
  if split == "train" and data.batch_size > len(source):
    _LOG.warning(
      "data.batch_size=%d: more than the %d training examples, which a batch "
      "then repeats",
      data.batch_size,
      len(source),
    )
  if data.source in ("digits", "fake"):  # never bad, and small by nature
    return source
  skip = data.bad_images == "skip" and split == "train"
  smallest = (0, 0)
  if crops_center(config, split):
    smallest = model.input_shape[:2]
  return CheckedSource(source, skip=skip, smallest=smallest)


def check_class_names(
  ours: tuple[str, ...], theirs: tuple[str, ...], where: str
) -> None:
  """Checks that the labels of model and data mean the same classes.

  Args:
    ours: class names that the model was trained with.
    theirs: class names of the data.
    where: name of the data, for the message.

  Raises:
    ValueError: a label has two names.
  """
  for label, (mine, other) in enumerate(zip(ours, theirs)):
    if mine != other:
      raise ValueError(
        f"{where}: class {label} is {other!r}, the model's is {mine!r}; class "
        "directories must have the names of the training split"
      )
