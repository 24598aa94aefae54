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

from moh_jax.config import Config, DataConfig, ImageModel
from moh_jax.config.data import FILE_SOURCES
from moh_jax.data.extras import import_extra
from moh_jax.data.identity import Identity
from moh_jax.data.images import tables
from moh_jax.data.images.classes import (
  ClassList,
  check_class_names,
  read_class_list,
)
from moh_jax.data.images.encoded import EncodedSource
from moh_jax.data.images.folders import SPLITS, find_splits
from moh_jax.data.images.image_folder import ImageFolderSource
from moh_jax.data.images.latents import LatentSource
from moh_jax.data.images.parquet import ParquetSource
from moh_jax.data.images.recipes import crops_center, is_latent
from moh_jax.data.images.records import ArrayRecordSource
from moh_jax.data.images.tolerant import CheckedSource
from moh_jax.data.shards import METADATA

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
  if data.source == "parquet":
    return data.val_share > 0 or split in tables.find_tables(data.path)
  return not data.path or (epath.Path(data.path) / split).exists()


def open_files(
  data: DataConfig,
  split: str,
  channels: int,
  class_names: tuple[str, ...] | ClassList = (),
) -> EncodedSource:
  """Opens a split of images that are files: in folders, shards or tables.

  Args:
    data: section `data` of the config, of such a source.
    split: "train" or "val".
    channels: 1 decodes to grey, 3 to RGB.
    class_names: classes whose positions are the labels; () takes those of
      `data.class_list`, else of the data. Shards have labels of their own.

  Raises:
    FileNotFoundError: there is no such split.
    ValueError: the data are damaged, or have classes beside `class_names`.
  """
  if data.source == "array_record":
    if split == "val" and not (epath.Path(data.path) / split).exists():
      raise FileNotFoundError(
        f"data.path={data.path!r} has no val/; `pack-images --val-share P` "
        "makes one, and data.val_share is for folders and tables"
      )
    return ArrayRecordSource(data.path, split, channels)
  if data.class_list and not class_names:
    class_names = read_class_list(data.class_list)
  shared: dict[str, Any] = {
    "val_share": data.val_share,
    "class_names": class_names,
  }
  if data.source == "image_folder":
    return ImageFolderSource(data.path, split, channels, **shared)
  return ParquetSource(
    data.path, split, channels, **shared, label_column=data.label_column
  )


def open_splits(
  path: str,
  split: str | None,
  channels: int = 3,
  class_names: tuple[str, ...] | ClassList = (),
  label_column: str = "",
  val_share: float = 0.0,
) -> dict[str, EncodedSource]:
  """Opens images of any kind on disk, whichever it is.

  Args:
    path: folder with train/ and val/ (or one of them), or with one split
      directly, of class folders or of what `pack-images` wrote; or a folder of
      Parquet or Arrow files.
    split: the wanted split; None opens all. If `path` is one split directly,
      this is the name it gets, "train" for None.
    channels: 1 decodes to grey, 3 to RGB.
    class_names: classes whose positions are the labels; () takes those of the
      first split for all.
    label_column: column of the labels of tables; "" finds it.
    val_share: share of folders or tables that is held out as "val" where there
      is no such split, by `is_held_out`.

  Returns:
    Sources by split.

  Raises:
    FileNotFoundError: there is no such split.
    ValueError: the data are damaged, or have classes beside `class_names`; a
      column of folders or shards; a share of shards.
  """
  opened: dict[str, EncodedSource] = {}
  if tables.is_tables(path):
    names = SPLITS if val_share else tables.find_tables(path)
    for name in [split] if split else names:
      opened[name] = source = ParquetSource(
        path,
        name,
        channels,
        val_share=val_share,
        class_names=class_names,
        label_column=label_column,
      )
      class_names = source.class_names
    return opened
  if label_column:
    raise ValueError(
      f"--label-column={label_column!r} must be '': {path} has no tables"
    )
  if val_share and (found := find_splits(path)).keys() == {"train"}:
    if (found["train"] / METADATA).is_file():
      raise ValueError(f"--val-share={val_share} must be 0: {path} is packed")
    for name in [split] if split else SPLITS:
      opened[name] = source = ImageFolderSource(
        path, name, channels, val_share=val_share, class_names=class_names
      )
      class_names = source.class_names
    return opened
  for name, folder in find_splits(path, split).items():
    if (folder / METADATA).is_file():
      opened[name] = ArrayRecordSource(str(folder), "", channels)
      continue
    opened[name] = source = ImageFolderSource(
      str(folder), "", channels, class_names=class_names
    )
    class_names = source.class_names
  return opened


def make_source(
  config: Config, split: str, class_names: tuple[str, ...] = ()
) -> ImageSource:
  """Opens one split of the configured source.

  `data.bad_images` decides what happens to unreadable images of the training
  split. In the held-out split they always raise: metrics on fewer images could
  not be compared. With "check" all images of the split are read here, with
  "skip" those of the held-out split.

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
  elif data.source in FILE_SOURCES:
    source = open_files(data, split, model.channels, class_names)
    if data.decode == "fast":
      import_extra("cykooz_resizer", "data.decode='fast'", "images")
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
  if found < 2 and "classifier" in config.sections:
    raise ValueError(
      f"{where} one class, {source.class_names[0]!r}; a classifier needs at "
      "least 2, each in a folder of its own"
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
  checked = CheckedSource(
    source, skip=skip, smallest=smallest, decode=data.decode
  )
  # Training leaves out what it cannot read, evaluation must not: so it is known
  # before the first step that it will not end the run.
  if data.bad_images == "check" or (data.bad_images, split) == ("skip", "val"):
    bad = checked.read_all(
      data.num_threads,
      "remove them, or leave them out with data.bad_images='skip'"
      if split == "train"
      else "remove them: data.bad_images='skip' is for training images, as "
      "accuracies on fewer images could not be compared",
    )
    if bad and split == "train" and has_split(config, "val"):
      try:  # one error for both parts
        make_source(config, "val", source.class_names)
      except (ValueError, FileNotFoundError) as error:
        bad += f"; {error}"
    if bad:
      raise ValueError(f"{where} {bad}")
  return checked
