"""Sources of labelled images: what all have in common, and folders of files.

Example i of a source is {"image": [X, Y, channels] uint8, "label": int32}. In
sources of latents "image" is the stored posterior, see `packed.py`.
"""

import abc
import concurrent.futures
import contextlib
import glob
import hashlib
import logging
import math
import os
import pathlib
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from moh_jax.config import Config, imported
from moh_jax.config.registry import SPLITS, MissingSplitError, get_source
from moh_jax.data import decode
from moh_jax.data.files import SPLIT_WORDS, Identity, fingerprint_of
from moh_jax.runtime.alive import alive

Example = dict[str, Any]
Names = tuple[str, ...]  # of classes
FLAT_CLASS = "images"  # the one class of a folder without class folders
FEW = 20  # held-out examples whose score says little
_MOST_NAMED = 10  # bad images, or classes, in one message
# Images whose headers tell the size and the channels of all: a look at each
# would take minutes at ImageNet's size.
_LOOKED_AT = 64
# Sides of inputs are multiples of this, which every stage can halve. A few
# hundred images teach a network no details, which take most of its time.
_SIDE_STEP = 32
_MOST_SIDE = ((1000, 64), (10_000, 128), (math.inf, 224))  # images below, side
_SUFFIXES = (
  *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff"),
  *(".gif", ".avif", ".jp2", ".ppm", ".pgm"),
)
_LOG = logging.getLogger(__name__)


class ImageSource(abc.ABC):
  """Random access to labelled images in a fixed order.

  A subclass that `moh_jax.register_source` has made known is a value of
  `data.source`.

  Attributes:
    class_names: names of the classes, in the order of the labels.
    channels: of the images.
    encoder_sha256: of the autoencoder that made latents; "" where none did.
  """

  class_names: Names
  channels: int
  encoder_sha256 = ""

  @classmethod
  def open(cls, config: Config, split: str, class_names: Names = ()) -> Self:
    """Opens one split of a run's images; by default calls the class so.

    Args:
      config: the run.
      split: "train" or "val".
      class_names: classes of the model, whose positions are the labels; ()
        takes those of the data.

    Raises:
      MissingSplitError: there is no such split.
      FileNotFoundError: data are missing.
      ValueError: they are damaged, or have classes beside `class_names`.
    """
    return cls(config, split, class_names)  # type: ignore[call-arg]

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """What the data tell of fields that a run leaves unset.

    Args:
      config: the run.
      names: of the fields, among "channels", "num_classes", "image_size",
        "mean" and "std".

    Returns:
      Values by name; those that are not known are absent.

    Raises:
      FileNotFoundError: data are missing.
      ValueError: they are damaged.
    """
    return {}

  @abc.abstractmethod
  def __len__(self) -> int:
    """Number of examples."""

  @abc.abstractmethod
  def __getitem__(self, index: int) -> Example:
    """Returns {"image": [X, Y, channels] uint8, "label": int32}.

    Raises:
      OSError: the file of the image is gone.
      ValueError: it is damaged; the message names it.
    """

  def identity(self) -> Identity:
    """What identifies the examples and their order: here their number alone."""
    return {"examples": len(self)}

  def name(self, index: int) -> str:
    """Name of an example, the same wherever the data lie."""
    return f"example {index}"


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
      data: class folders in alphabetical order (numbers by value), or what
      tables name.
    label_column: column of the labels of tables; "" finds it.
  """

  val_share: float = 0.0
  class_names: Names = ()
  label_column: str = ""


ALL = Selection()


class EncodedSource(ImageSource):
  """Images that are files, which are decoded to grey or RGB by `channels`.

  Subclasses take path, split, channels and a `Selection`, of which shards need
  nothing. They say what `read` gives; all else follows from it.
  """

  @classmethod
  def open(cls, config: Config, split: str, class_names: Names = ()) -> Self:
    """Opens a split as the section `data` says."""
    data = config.data
    names = class_names or listed_classes(data.class_list)
    selection = Selection(data.val_share, names, data.label_column)
    channels = config.model.channels or 3
    if channels not in (1, 3):
      raise ValueError(
        f"model.channels={channels} must be 1 (grey) or 3 (RGB) for image files"
      )
    return cls(data.path, split, channels, selection)

  @abc.abstractmethod
  def read(self, index: int) -> Record:
    """The file of an image, not decoded.

    Raises:
      OSError: it is gone.
      ValueError: it cannot be read.
    """

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Identifies the list of images."""

  def identity(self) -> Identity:
    """Identifies the images."""
    return {"examples": len(self), "fingerprint": self.fingerprint}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The classes of the training images, and what some headers say.

    The size is a square about as large as the images, in steps of 32, and the
    smaller the fewer they are. Images whose headers cannot be read are for
    `data.bad_images`.
    """
    if not {"channels", "image_size", "num_classes"} & set(names):
      return {}
    source, found = cls.open(config, "train"), []
    for i in range(0, len(source), -(-len(source) // _LOOKED_AT)):
      with contextlib.suppress(ValueError, OSError):
        record = source.read(i)
        found.append(decode.describe_image(record.content, record.place))
    if not found:
      raise ValueError(f"data.path={config.data.path!r}: no image can be read")
    sizes, greys = zip(*found)
    side = statistics.median_low(map(min, sizes)) // _SIDE_STEP * _SIDE_STEP
    most = next(most for count, most in _MOST_SIDE if len(source) < count)
    side = max(min(side, most), _SIDE_STEP)
    if "image_size" in names:
      said = "data: %d images are read at %d x %d pixels; another size: %s"
      _LOG.info(said, len(source), side, side, "--config.model.image_size=N")
    return {
      "num_classes": len(source.class_names),
      "channels": 1 if all(greys) else 3,
      "image_size": (side, side),
    }

  def __getitem__(self, index: int) -> Example:
    """Returns a decoded example."""
    record = self.read(index)
    image = decode.decode_image(record.content, self.channels, record.place)
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
      path: local directory of the splits.
      split: "train" or "val".
      channels: 1 converts to grey, 3 to RGB.
      selection: of the images.

    Raises:
      MissingSplitError: there is no such split.
      FileNotFoundError: there is no such directory, or no image in it.
      ValueError: a class folder holds no image or is none of `class_names`, or
        a split would be left without images.
    """
    root, share = pathlib.Path(path), selection.val_share
    if not root.is_dir():
      raise FileNotFoundError(f"data.path={path!r}: no such directory")
    found = [name for name in SPLITS if (root / name).is_dir()]
    divided = "val" not in found and share > 0
    name = "train" if divided else split
    if name not in (found or SPLITS[:1]):
      raise MissingSplitError(
        f"data.path={path!r} has no directory {split!r}; expected {path}/"
        f"{split}/CLASS/*.jpg, or data.val_share above 0"
      )
    self._root, self.channels = root / name if found else root, channels
    self.class_names, self._files = list_images(self._root)
    if divided:
      names, labels = zip(*self._files)
      chosen = hold_out(names, labels, split, share, self._root)
      self._files = [self._files[i] for i in chosen]
    if wanted := selection.class_names:
      where = str(self._root)
      self.class_names, labels = match_classes(self.class_names, wanted, where)
      self._files = [(name, labels[label]) for name, label in self._files]

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images: names, labels and sizes."""
    names, labels = zip(*self._files)
    found = fingerprint_of(self._root, names, str(labels).encode())
    return f"{len(self)} files, xxh3 {found}"

  def __len__(self) -> int:
    return len(self._files)

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    name, label = self._files[index]
    path = self._root / name
    return Record(label, str(path), path.read_bytes())

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"."""
    return self._files[index][0]


@alive("listing the images")
def list_images(root: pathlib.Path) -> tuple[Names, list[tuple[str, int]]]:
  """Lists the images ROOT/CLASS/*, classes by number, then by name.

  A flat folder, of images and no other folders, is one class. What is hidden
  (".name") or no image is left out.

  Returns:
    The class names, and for each file its name below `root` and its label.

  Raises:
    FileNotFoundError: there is no image in it, or in one of its folders.
    ValueError: the folders are splits.
  """
  classes = [x.name for x in root.iterdir() if x.is_dir() and x.name[0] != "."]
  classes.sort(key=lambda n: (int(n) if n.isdecimal() else math.inf, n))
  if len(classes) > 1 and {n.lower() for n in classes} <= SPLIT_WORDS.keys():
    raise ValueError(f"{root}: {classes} are splits: call them train and val")
  files = []
  for label, name in enumerate(classes or [""]):
    listed = sorted(x for x in os.listdir(root / name) if x[0] != ".")
    found = [x for x in listed if x.lower().endswith(_SUFFIXES)]
    if not found:
      raise FileNotFoundError(
        f"{root / name} holds no image {_SUFFIXES}; for other files set "
        "data.source"
      )
    files += [(f"{name}/{file}".lstrip("/"), label) for file in found]
  return tuple(classes) or (FLAT_CLASS,), files


def find_images(paths: Iterable[str]) -> list[str]:
  """Image files: those given, and all in and below the folders given.

  Raises:
    FileNotFoundError: a folder holds none.
  """
  files = []
  for path in paths:
    below = glob.glob(f"{glob.escape(path)}/**", recursive=True)  # no hidden
    found = sorted(x for x in below if x.lower().endswith(_SUFFIXES))
    if os.path.isdir(path) and not found:
      raise FileNotFoundError(f"{path} holds no image: {_SUFFIXES}")
    files += found or [path]
  return files


def hold_out(
  names: Sequence[str],
  labels: Sequence[int],
  split: str,
  share: float,
  where: Any,
) -> list[int]:
  """Positions of the images of a split where a share of them is held out.

  It is that share of each class, as nearly as whole images allow. A hash of an
  image's name decides, so that further images move few from one split to the
  other.

  Args:
    names: of the images.
    labels: of the images.
    split: "train" or "val".
    share: `data.val_share`.
    where: of the images, for messages.

  Raises:
    ValueError: training lacks a class, or nothing is held out.
  """

  def digest(i: int) -> bytes:
    return hashlib.sha256(names[i].encode(errors="surrogateescape")).digest()

  # An image's place in its class, from 0 to 1; the first of all are held out.
  counts, seen, place = Counter(labels), Counter(), {}
  for i in sorted(range(len(names)), key=digest):
    label = labels[i]
    place[i] = (seen[label] + 0.5) / counts[label]
    seen[label] += 1
  number = round(share * len(names))
  held_out = set(sorted(place, key=place.get)[:number])
  of_val = split == "val"
  chosen = [i for i in range(len(names)) if (i in held_out) == of_val]
  if of_val and number < FEW and share < 1:
    said = "%s: only %d images are held out (data.val_share), few for a score"
    _LOG.warning(said, where, number)
  if not chosen or not (of_val or {*labels} == {labels[i] for i in chosen}):
    what = "no image" if of_val else "every image of a class"
    raise ValueError(f"{where}: data.val_share={share} holds out {what}")
  return chosen


def listed_classes(file: str | None) -> Names:
  """Reads a list of classes, one a line; () where no file is named."""
  lines = pathlib.Path(file).read_text("utf-8").splitlines() if file else []
  return tuple(line.strip() for line in lines if line.strip())


def match_classes(
  found: Names, wanted: Names, where: str
) -> tuple[Names, list[int]]:
  """Finds the labels of class folders among a model's classes, by name.

  Folders that are named by numbers, where no class is, are labels themselves.

  Args:
    found: names of the folders.
    wanted: classes of the model, or the lines of a list of them, such as
      "n01440764 tench, Tinca tinca": then the first word is the name.
    where: name of the data, for the message.

  Returns:
    The wanted classes, and the label of each folder.

  Raises:
    ValueError: a folder is none of the classes.
  """
  if found == wanted:  # of which ImageNet's have two "crane"
    return wanted, [*range(len(found))]
  names = wanted
  if not {*found} <= {*wanted} and all(map(str.isdecimal, found)):
    names = tuple(map(str, range(len(wanted))))  # labels, as of ImageNet-V2
  elif not {*found} <= {*wanted}:
    names = wanted = tuple(line.split()[0] for line in wanted)
  labels = {name: label for label, name in enumerate(names)}
  if len(labels) < len(wanted):
    raise ValueError(f"{where}: one of {_few(wanted)} is there twice")
  if unknown := [name for name in found if name not in labels]:
    raise ValueError(f"{where}: class {unknown[0]!r} is none of {_few(wanted)}")
  return wanted, [labels[name] for name in found]


def _few(names: Names) -> str:
  """How many classes there are, and the names of the first ones."""
  more = ", ..." * (len(names) > _MOST_NAMED)
  return f"{len(names)} classes ({', '.join(names[:_MOST_NAMED])}{more})"


def is_latent(config: Config) -> bool:
  """Whether the model reads latents."""
  return "diffusion" in config.sections and config.diffusion.space == "latent"


def make_source(
  config: Config, split: str, class_names: Names = ()
) -> "CheckedSource":
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
    MissingSplitError: there is no such split.
    FileNotFoundError: a directory or metadata.json is missing.
    ValueError: the data is damaged, lacks a shard, or does not fit the model or
      its classes.
  """
  data, model = config.data, config.model
  source = imported(get_source(data).source).open(config, split, class_names)
  where, names = f"{data.path or data.source}, {split}", source.class_names
  if (len(names), source.channels) != (model.num_classes, model.channels):
    raise ValueError(
      f"{where}: {_few(names)}, images of {source.channels} channels, must be "
      f"model.num_classes={model.num_classes}, model.channels={model.channels}"
    )
  if len(names) < 2 and "classifier" in config.sections:
    raise ValueError(f"{where}: {_few(names)}, a classifier needs at least 2")
  if class_names and class_names != names:
    theirs = _few(class_names)
    raise ValueError(f"{where}: {_few(names)}, the model has {theirs}")
  counts = len(source), len(names)
  _LOG.info("data: %s: %d examples of %d classes", where, *counts)
  skips = data.bad_images == "skip"
  checked = CheckedSource(source, skip=skips and split == "train")
  # Training leaves out what it cannot read, evaluation must not: so it is known
  # before the first step that it will not end the run.
  if data.bad_images == "check" or (skips and split == "val"):
    todo = "data.bad_images='skip' trains without"
    if split == "val":
      todo = "held-out images must all be readable, remove"
    checked.read_all(data.num_threads, where, todo)
  return checked


class CheckedSource:
  """A source whose bad images raise, or are replaced by the next good one.

  The replacement depends on the index alone, so a stream keeps its length and
  its positions whatever images are bad.
  """

  def __init__(self, source: Any, *, skip: bool):
    """Wraps a source.

    Args:
      source: source that raises ValueError or OSError for an example that it
        cannot read.
      skip: whether bad images are replaced; otherwise they raise.
    """
    self._source, self._skip = source, skip
    self._bad: set[int] = set()

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):  # of this object, which pickle is making
      raise AttributeError(name)
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Example:
    for step in range(len(self)):
      candidate = (index + step) % len(self)
      try:
        return self._checked(candidate)
      except (ValueError, OSError) as error:
        if not self._skip:
          raise
        if candidate not in self._bad:
          self._bad.add(candidate)
          _LOG.warning("skipped %s (%d so far)", error, len(self._bad))
    raise ValueError(f"none of the {len(self)} images can be read")

  def read_all(self, threads: int, where: str, todo: str) -> None:
    """Reads every example once.

    Args:
      threads: number of threads that read.
      where: names the source in messages.
      todo: what to do about those that cannot be read, for messages.

    Raises:
      ValueError: some cannot be read; the first ones are named.
    """

    def error(index: int) -> str:
      try:
        self._checked(index)
      except (ValueError, OSError) as bad:
        return str(bad)
      return ""

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      bad = list(filter(None, pool.map(error, range(len(self)))))
    if bad:
      named = "; ".join(bad[:_MOST_NAMED])
      raise ValueError(
        f"{where}: {len(bad)} of {len(self)} images cannot be used; {todo}: "
        f"{named}"
      )

  def _checked(self, index: int) -> Example:
    """An example, whose label is one of the classes."""
    example, last = self._source[index], len(self._source.class_names) - 1
    label = np.int32(example["label"])
    if not 0 <= label <= last:
      name = self._source.name(index)
      raise ValueError(f"{name}: label={label} must be in [0, {last}]")
    return {**example, "label": label}
