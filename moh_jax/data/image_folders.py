"""Folders of image files: their splits, classes and held-out share."""

import abc
import functools
import hashlib
import logging
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from moh_jax.config import Config
from moh_jax.config.registry import SPLITS, MissingSplitError
from moh_jax.data import decode, sources
from moh_jax.data.identity import Identity, of_files
from moh_jax.data.input_files import SPLIT_WORDS
from moh_jax.runtime.alive import alive

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Further ones that commands read, but training does not.
_OTHER_SUFFIXES = (
  *(".apng", ".avif", ".dib", ".j2c", ".j2k", ".jfif", ".jp2", ".jpe", ".jpf"),
  *(".jpx", ".pbm", ".pgm", ".pnm", ".ppm"),
)
FLAT_CLASS = "images"  # the one class of a folder without class folders
_LOG = logging.getLogger(__name__)

# Images whose headers tell the size and the channels of all: a look at each
# would take minutes at ImageNet's size.
_LOOKED_AT = 64
# Sides of inputs are multiples of this, which every stage can halve.
_SIDE_STEP, _MOST_INFERRED_SIDE = 32, 224

# "CLASS/NAME" (or "NAME" in a flat folder) and label of each image.
Files = list[tuple[str, int]]


class Record(NamedTuple):
  """An image file and its label; `place` names it in messages."""

  label: int
  place: str
  content: bytes


class Selection(NamedTuple):
  """Which images of a path are taken, and what their labels are.

  Attributes:
    val_share: share that is held out where there is no val.
    class_names: classes whose positions are the labels; () takes those of the
      data: class folders in alphabetical order, or what tables name.
    label_column: column of the labels of tables; "" finds it.
  """

  val_share: float = 0.0
  class_names: tuple[str, ...] | sources.ClassList = ()
  label_column: str = ""


ALL = Selection()


class EncodedSource(sources.ImageSource):
  """Images that are files, which are decoded to grey or RGB by `channels`.

  Subclasses take path, split, channels and a `Selection`, of which shards need
  nothing. They say what `read` gives; all else follows from it.
  """

  @classmethod
  def open(
    cls, config: Config, split: str, class_names: tuple[str, ...] = ()
  ) -> "EncodedSource":
    """Opens a split as the section `data` says."""
    data = config.data
    names = class_names or sources.listed_classes(data.class_list)
    selection = Selection(data.val_share, names, data.label_column)
    return cls(data.path, split, config.model.channels or 3, selection)

  @abc.abstractmethod
  def read(self, index: int) -> Record:
    """The file of an image, not decoded.

    Raises:
      FileNotFoundError: it is gone.
      ValueError: it cannot be read.
    """

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Identifies the list of images."""

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The classes of the training images, and what some headers say.

    The size is a square about as large as the images, in steps of 32 up to
    224. Images whose headers cannot be read are for `data.bad_images`.
    """
    if not {"channels", "image_size", "num_classes", "pixels"} & set(names):
      return {}
    source = cls.open(config, "train")
    told = {"num_classes": len(source.class_names)}
    if not {"channels", "image_size", "pixels"} & set(names):
      return told
    found, bad = [], ""
    for i in range(0, len(source), -(-len(source) // _LOOKED_AT)):
      try:
        record = source.read(i)
        found.append(decode.describe_image(record.content, record.place))
      except (ValueError, FileNotFoundError) as error:
        bad = bad or str(error)
    if not found:
      raise ValueError(
        f"data.path={config.data.path!r}: none of the images that were looked "
        f"at can be read; the first: {bad}"
      )
    sizes, greys = zip(*found)
    told["pixels"] = tuple(map(statistics.median_low, zip(*sizes)))
    side = statistics.median_low(map(min, sizes)) // _SIDE_STEP * _SIDE_STEP
    side = max(min(side, _MOST_INFERRED_SIDE), _SIDE_STEP)
    channels = 1 if all(greys) else 3
    return {**told, "channels": channels, "image_size": (side, side)}

  def __getitem__(self, index: int) -> sources.Example:
    """Returns a decoded example."""
    return self._decoded(index, decode.decode_image)

  def later(self, index: int) -> sources.Example:
    """As `source[index]`, but "image" of a JPEG file is a `LaterImage`."""
    return self._decoded(index, decode.decode_later)

  def _decoded(self, index: int, read: Callable[..., Any]) -> sources.Example:
    record = self.read(index)
    image = read(record.content, self.channels, record.place)
    return {"image": image, "label": np.int32(record.label)}


class ImageFolderSource(EncodedSource):
  """Source of the image files of a split.

  A directory has train/ and val/, or the images of both, of which a share may
  be held out as "val"; see `list_images` and `hold_out`.
  """

  def __init__(
    self, path: str, split: str, channels: int, selection: Selection = ALL
  ):
    """Lists the files of a split.

    Args:
      path: directory of the splits, local or a bucket.
      split: "train" or "val"; "" reads `path` itself.
      channels: 1 converts to grey, 3 to RGB.
      selection: of the images.

    Raises:
      MissingSplitError: there is no such split.
      FileNotFoundError: there is no such directory, or no image in it.
      ValueError: a class folder holds no image or is none of `class_names`, or
        a split would be left without images.
    """
    share, divided, self._held_out = selection.val_share, False, ""
    self._root, self.channels = epath.Path(path), channels
    if split:
      if not self._root.is_dir():
        raise FileNotFoundError(
          f"data.path={path!r}: no such directory; --config.data.path=DIR "
          "names yours"
        )
      found = find_splits(path)
      divided = "train" in found and "val" not in found and share > 0
      name = "train" if divided else split
      if name not in found:
        hint = ", or data.val_share above 0" if "train" in found else ""
        raise MissingSplitError(
          f"data.path={path!r} has no directory {split!r}; expected "
          f"{path}/{split}/CLASS/*.jpg{hint}"
        )
      self._root = found[name]
    own, self._files = list_images(self._root)
    if divided:
      names, labels = zip(*self._files)
      chosen = hold_out(names, labels, split, share, own, self._root)
      self._files = [self._files[i] for i in chosen]
      self._held_out = f"{share:g}" if self._root.name != split else ""
    self.class_names = own
    class_names = selection.class_names
    if split == "val" and not class_names and all(map(str.isdecimal, own)):
      # Without names of the model, numbers are labels; in training folders are
      # in alphabetical order, which is another from the 11th class on.
      class_names = tuple(map(str, range(len(own))))
    if class_names:
      where = str(self._root)
      self.class_names, labels = sources.match_classes(own, class_names, where)
      self._files = [(name, labels[label]) for name, label in self._files]

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images: its length and a hash of names."""
    digest = hashlib.sha256()
    for name, label in self._files:
      digest.update(f"{label} {name}\n".encode(errors="surrogateescape"))
    return f"{len(self)} files, sha256 {digest.hexdigest()[:16]}"

  def __len__(self) -> int:
    return len(self._files)

  def identity(self) -> Identity:
    """Identifies the images; those in a bucket by their names alone."""
    found: Identity = {"examples": len(self), "fingerprint": self.fingerprint}
    root = os.fspath(self._root)
    if "://" not in root:
      found["content"] = of_files([f"{root}/{name}" for name, _ in self._files])
    return found | {"val_share": self._held_out} if self._held_out else found

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    name, label = self._files[index]
    path = self._root / name
    return Record(label, str(path), decode.read_bytes(path))

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"."""
    return self._files[index][0]


@alive("listing the images")
def list_images(folder: str | os.PathLike) -> tuple[tuple[str, ...], Files]:
  """Lists the images FOLDER/CLASS/*, classes in alphabetical order.

  A flat folder, of images and no other folders, is one class. Hidden files and
  folders (".name") are left out, all else that is no image with a warning.

  Args:
    folder: local directory or bucket.

  Returns:
    The class names, and for each file its name below `folder` and its label.

  Raises:
    FileNotFoundError: there is no such folder, or no image in it.
    ValueError: a class folder holds no image, or the folders are splits.
  """
  root = epath.Path(folder)
  classes = [path.name for path in _folders(root)]
  if len(classes) > 1 and {n.lower() for n in classes} <= SPLIT_WORDS.keys():
    raise ValueError(
      f"{root}: {', '.join(classes)} are splits, no classes; they must be "
      "called train and val"
    )
  listed = {f"{name}/": _file_names(root / name) for name in classes}
  images, others = _file_names(root)
  if classes:  # a list of classes, say, may stand there too
    others = [n + file for n, (_, rest) in listed.items() for file in rest]
    others += images
  else:
    classes, listed = [FLAT_CLASS], {"": (images, others)}
  if others:
    _warn_of_others(str(root), len(others), others[0], _SUFFIXES)
  files = [
    (name + file, label)
    for label, (name, (found, _)) in enumerate(listed.items())
    for file in found
  ]
  if not files:
    raise FileNotFoundError(
      f"{root} holds no image; expected {root}/CLASS/*, or images without "
      f"classes, with a suffix in {_SUFFIXES} (shards and tables: set "
      "data.source)"
    )
  if empty := [name[:-1] for name, (found, _) in listed.items() if not found]:
    raise ValueError(
      f"{root}: class folder {', '.join(map(repr, empty[:10]))} holds no image "
      f"with a suffix in {_SUFFIXES}; add some, or remove the folder"
    )
  return tuple(classes), files


def hold_out(
  names: Sequence[str],
  labels: Sequence[int],
  split: str,
  share: float,
  class_names: Sequence[str],
  where: Any,
) -> list[int]:
  """Positions of the images of a split where a share of them is held out.

  A hash of an image's name decides, so that further images move none from one
  split to the other.

  Args:
    names: of the images.
    labels: of the images.
    split: "train" or "val".
    share: `data.val_share`.
    class_names: of all classes.
    where: of the images, for messages.

  Raises:
    ValueError: training lacks a class, or nothing is held out.
  """

  def is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64

  of_val = split == "val"
  chosen = [i for i, name in enumerate(names) if is_held_out(name) == of_val]
  # A schema of a table may name classes that have no rows.
  absent = set(labels) - {labels[i] for i in chosen}
  what = f"{where}: data.val_share={share} holds out"
  if split == "train" and absent:
    raise ValueError(
      f"{what} every image of class {class_names[min(absent)]!r}; add images, "
      "or make train/ and val/"
    )
  if not chosen:
    raise ValueError(f"{what} no image; add images, or raise it")
  if absent:
    left_out = ", ".join(repr(class_names[i]) for i in sorted(absent)[:5])
    count = f"{len(absent)} of {len(set(labels))} classes"
    _LOG.warning("%s no image of %s, such as %s", what, count, left_out)
  return chosen


def find_files(folder: str | os.PathLike, *, warn: bool = False) -> list[str]:
  """Paths of the images in a folder and all below it, in order.

  Args:
    folder: local; images are of the usual formats that Pillow decodes, by
      suffix.
    warn: whether to warn of other files that are not hidden.

  Raises:
    FileNotFoundError: there is none.
  """
  suffixes, paths, others = _SUFFIXES + _OTHER_SUFFIXES, [], []
  for where, below, names in os.walk(folder):
    below[:] = [name for name in below if not name.startswith(".")]
    for name in names:
      if not name.startswith("."):
        known = os.path.splitext(name)[1].lower() in suffixes
        (paths if known else others).append(os.path.join(where, name))
  if not paths:
    raise FileNotFoundError(
      f"{folder} holds no image file with a suffix in {suffixes}"
    )
  if warn and others:
    _warn_of_others(str(folder), len(others), min(others), suffixes)
  return sorted(paths)


def find_images(paths: Iterable[str]) -> list[str]:
  """Image files: those given, and all in and below the folders given.

  Raises:
    FileNotFoundError: a folder holds none.
  """
  return [
    file
    for path in paths
    for file in (find_files(path, warn=True) if os.path.isdir(path) else [path])
  ]


def find_splits(
  root: str | os.PathLike, split: str | None = None
) -> dict[str, epath.Path]:
  """Finds the splits of a directory of images.

  Args:
    root: directory that holds train/ and val/ (or one of them), or the classes,
      images or packed images of one split directly.
    split: the wanted split; None finds all. If `root` is one split directly,
      this is the name it gets, "train" for None.

  Returns:
    Folders by the name of the split.

  Raises:
    FileNotFoundError: there is no such directory or split.
  """
  folders = {path.name: path for path in _folders(epath.Path(root))}
  # A class may be called "train" too: beside other classes, it is a split only
  # if it does not hold image files alone.
  only = {name.lower() for name in folders} <= SPLIT_WORDS.keys()

  def is_split(folder: epath.Path) -> bool:  # it has classes or packed images
    return any(
      x.is_dir() or x.name == "metadata.json" for x in folder.iterdir()
    )

  found = {
    name: folders[name]
    for name in SPLITS
    if name in folders and (only or is_split(folders[name]))
  }
  found = found or {split or SPLITS[0]: epath.Path(root)}
  if split is not None and split not in found:
    raise FileNotFoundError(
      f"{root} has no split {split!r}, only {sorted(found)}"
    )
  return found if split is None else {split: found[split]}


def has_class_images(root: str | os.PathLike) -> bool:
  """Whether a directory has class folders, and all of them hold images.

  Raises:
    FileNotFoundError: there is no such directory.
  """
  splits = find_splits(root).values()
  classes = [folder for split in splits for folder in _folders(split)]
  return bool(classes) and all(_file_names(folder)[0] for folder in classes)


def _folders(root: epath.Path) -> list[epath.Path]:
  """The folders in a directory that are not hidden, in alphabetical order."""
  if not root.is_dir():
    raise FileNotFoundError(f"{root}: no such directory of images")
  return sorted(
    entry
    for entry in root.iterdir()
    if not entry.name.startswith(".") and entry.is_dir()
  )


def _file_names(folder: epath.Path) -> tuple[list[str], list[str]]:
  """Names of images and of other things in a folder, not hidden, in order."""
  if "://" in os.fspath(folder):  # asking for each file would take minutes
    found = [(entry.name, False) for entry in folder.iterdir()]
  else:
    with os.scandir(folder) as entries:
      found = [(entry.name, entry.is_dir()) for entry in entries]
  images, others = [], []
  for name, is_folder in sorted(found):
    if not name.startswith("."):
      known = os.path.splitext(name)[1].lower() in _SUFFIXES
      (images if known and not is_folder else others).append(name)
  return images, others


@functools.cache  # a run lists its images more than once
def _warn_of_others(
  root: str, count: int, example: str, suffixes: tuple[str, ...]
) -> None:
  _LOG.warning(
    "%s: left out %d files or folders, %r for one; images have a suffix in %s, "
    "and stand in class folders if there are any",
    root,
    count,
    example,
    suffixes,
  )
