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
from moh_jax.data.images.files import decode_image, describe_image, read_bytes
from moh_jax.data.images.folders import (
  SPLITS,
  find_splits,
  fingerprint,
  list_images,
  list_split,
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
  """Source of the image files of a split, see `folders.list_split`."""

  def __init__(
    self,
    path: str,
    split: str,
    channels: int,
    *,
    val_share: float = 0.0,
    class_names: tuple[str, ...] = (),
  ):
    """Lists the files of a split.

    Args:
      path: directory of the splits, local or a bucket.
      split: "train" or "val"; "" reads `path` itself.
      channels: 1 converts to grey, 3 to RGB.
      val_share: share that is held out where there is no val/.
      class_names: classes whose positions are the labels; () numbers the
        class folders in alphabetical order.

    Raises:
      FileNotFoundError: there is no such directory, or no image in it.
      ValueError: a class folder holds no image or is none of `class_names`.
    """
    self._held_out = ""
    if split:
      self._root, own, self._files = list_split(path, split, val_share)
      if val_share and self._root.name != split:
        self._held_out = f"{val_share:g}"
    else:
      self._root = epath.Path(path)
      own, self._files = list_images(self._root)
    self.class_names, self.channels = own, channels
    if split == "val" and not class_names and all(map(str.isdecimal, own)):
      # Without names of the model, numbers are labels; in training folders are
      # in alphabetical order, which is another from the 11th class on.
      class_names = tuple(map(str, range(len(own))))
    if class_names:
      labels = match_classes(own, class_names, str(self._root))
      self._files = [(name, labels[label]) for name, label in self._files]
      self.class_names = class_names

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images, see `files.fingerprint`."""
    return fingerprint(self._files)

  def __len__(self) -> int:
    return len(self._files)

  def identity(self) -> Identity:
    """Identifies the list of images; their content is not read."""
    found: Identity = {"examples": len(self), "fingerprint": self.fingerprint}
    return found | {"val_share": self._held_out} if self._held_out else found

  def read(self, index: int) -> bytes:
    """The file of an example, not decoded."""
    return read_bytes(self._root / self._files[index][0])

  def __getitem__(self, index: int) -> dict[str, Any]:
    name, label = self._files[index]
    path = str(self._root / name)
    image = decode_image(self.read(index), self.channels, path)
    return {"image": image, "label": np.int32(label)}

  def describe(self, index: int) -> tuple[tuple[int, int], bool]:
    """Rows and columns of an image, and whether it is grey."""
    path = self._root / self._files[index][0]
    return describe_image(self.read(index), str(path))

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
  data = config.data
  if data.source == "image_folder":
    return data.val_share > 0 or split in find_splits(data.path)
  return not data.path or (epath.Path(data.path) / split).exists()


def make_source(
  config: Config, split: str, class_names: tuple[str, ...] = ()
) -> ImageSource:
  """Opens one split of the configured source.

  `data.bad_images` decides what happens to unreadable images of the training
  split. In the held-out split they always raise: metrics on fewer images could
  not be compared. With "check" all images of the split are read here.

  Args:
    config: config of the run.
    split: "train" or "val".
    class_names: classes of the model, whose positions are the labels; () takes
      those of the data.

  Raises:
    FileNotFoundError: a directory, metadata.json or a shard is missing.
    ValueError: the data is damaged or does not fit the model or its classes.
  """
  if split not in SPLITS:
    raise ValueError(f"split={split!r} must be one of {SPLITS}")
  data, model = config.data, config.model
  if data.source == "digits":
    source = DigitsSource(split)
  elif data.source == "image_folder":
    source = ImageFolderSource(
      data.path,
      split,
      model.channels,
      val_share=data.val_share,
      class_names=class_names,
    )
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
  if data.source == "fake":  # its classes and its examples are as asked for
    return source
  check_class_names(class_names, source.class_names, where)
  if data.source == "digits":
    return source
  skip = data.bad_images == "skip" and split == "train"
  smallest = (0, 0)
  if crops_center(config, split):
    smallest = model.input_shape[:2]
  checked = CheckedSource(source, skip=skip, smallest=smallest)
  if data.bad_images == "check":
    checked.read_all(data.num_threads)
  return checked


def match_classes(
  found: tuple[str, ...], wanted: tuple[str, ...], where: str
) -> list[int]:
  """Finds the labels of class folders among a model's classes, by name.

  Folders that are named by numbers, as those of ImageNet-V2, are labels
  themselves unless the classes have such names too.

  Args:
    found: names of the folders.
    wanted: classes of the model.
    where: name of the data, for the message.

  Returns:
    The label of each folder.

  Raises:
    ValueError: a folder is none of the classes.
  """
  labels = {name: label for label, name in enumerate(wanted)}
  unknown = [name for name in found if name not in labels]
  if unknown and all(name.isdecimal() for name in found):
    labels = {str(label): label for label in range(len(wanted))}
    unknown = [name for name in found if name not in labels]
  if unknown:
    known = ", ".join(wanted[:10]) + ", ..." * (len(wanted) > 10)
    raise ValueError(
      f"{where}: class folder {unknown[0]!r} is none of the model's "
      f"{len(wanted)} classes ({known}), the names of the training's folders"
    )
  if missing := len(wanted) - len(set(found)):
    _LOG.warning("%s: no folder of %d classes", where, missing)
  return [labels[name] for name in found]


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
