"""Sources of labelled images: what all have in common, and that of a run.

Example i of a source is {"image": [X, Y, channels] uint8, "label": int32}. In
sources of latents "image" is the stored posterior, see `image_shards.py`.
"""

import abc
import concurrent.futures
import functools
import logging
import operator
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moh_jax.config import Config, imported
from moh_jax.config.registry import SPLITS, get_source
from moh_jax.data.decoding_memory import DECODING_MEMORY
from moh_jax.data.identity import Identity
from moh_jax.data.input_files import import_extra
from moh_jax.runtime.files import read_bytes

Example = dict[str, Any]
_DIGITS_SIDE = 32  # of inputs, which every stage can halve
_MOST_LIST_BYTES = 1 << 24  # of a list of classes
_MOST_NAMED = 10  # bad images in one message
_FAKE_CLASSES, _FAKE_SIDE = 1000, 224  # the usual ones
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

  class_names: tuple[str, ...]
  channels: int
  encoder_sha256 = ""

  @classmethod
  def open(
    cls, config: Config, split: str, class_names: tuple[str, ...] = ()
  ) -> "ImageSource":
    """Opens one split of a run's images; by default the class is called so.

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
        "mean" and "std"; and "pixels", the usual rows and columns.

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
      FileNotFoundError: the file of the image is gone.
      ValueError: it is damaged; the message names it.
    """

  def identity(self) -> Identity:
    """What identifies the examples and their order: here their number alone."""
    return {"examples": len(self)}

  def name(self, index: int) -> str:
    """Name of an example, the same wherever the data lie."""
    return f"example {index}"


class DigitsSource(ImageSource):
  """Scikit-learn's handwritten digits: 1,797 scans, 8 x 8 pixels, 16 greys.

  The held-out split is a fixed fifth of them, 359 scans.
  """

  class_names = tuple(str(digit) for digit in range(10))
  channels = 1

  def __init__(
    self, config: Config, split: str, class_names: tuple[str, ...] = ()
  ):
    """Opens a split, the same for all configs; see `open`."""
    del config, class_names
    images, labels = _load_digits()
    order = np.random.RandomState(0).permutation(len(labels))
    held_out = round(len(labels) / 5)
    index = order[:held_out] if split == "val" else order[held_out:]
    self._images, self._labels = images[index], labels[index]

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """All fields; mean and standard deviation are the training scans'."""
    del config, names
    told = {"channels": 1, "num_classes": 10, "image_size": (_DIGITS_SIDE,) * 2}
    return {**told, "mean": (0.3,), "std": (0.37,)}

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> Example:
    return {"image": self._images[index], "label": self._labels[index]}


@functools.cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
  from sklearn import datasets  # slow to import, only this source needs it

  digits = datasets.load_digits()
  images = np.round(digits.images * (255 / 16)).astype(np.uint8)
  return images[..., None], digits.target.astype(np.int32)


class FakeSource(ImageSource):
  """Random images (or latents) and labels; example i is the same in every run.

  Pixels are uniform, latents are standard normal.
  """

  def __init__(
    self, config: Config, split: str, class_names: tuple[str, ...] = ()
  ):
    """Prepares a split, of what the model reads; see `open`."""
    model = config.model
    self.class_names = class_names or tuple(map(str, range(model.num_classes)))
    self.channels, self._shape = model.channels, model.input_shape
    self._seed, self._latent = SPLITS.index(split), is_latent(config)
    self._examples = config.data.fake_examples

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The shapes of the usual images or latents."""
    del names
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


def is_latent(config: Config) -> bool:
  """Whether the model reads latents."""
  return "diffusion" in config.sections and config.diffusion.space == "latent"


def crops_center(config: Config, split: str) -> bool:
  """Whether images of a split get ADM's centre crop, see `CenterCrop`."""
  if is_latent(config):
    return False
  center = config.data.augment == "center_flip"
  return center or (split == "val" and "diffusion" in config.sections)


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
    MissingSplitError: there is no such split.
    FileNotFoundError: a directory, metadata.json or a shard is missing.
    ValueError: the data is damaged or does not fit the model or its classes.
  """
  data, model, kind = config.data, config.model, get_source(config.data)
  try:
    source = imported(kind.source).open(config, split, class_names)
    names, channels = source.class_names, source.channels
    size = len(source)
  except (OSError, ValueError):
    raise
  except Exception as error:  # of another package's code
    raise ValueError(
      f"data.source={data.source!r} fails: {type(error).__name__}: {error}"
    ) from error
  if data.decode == "fast":
    import_extra("cykooz_resizer", "data.decode='fast'", "images")
  where = f"{data.path or data.source}, {split}"
  wrong = "" if size else "no example"
  if (found := len(names)) != model.num_classes:
    wrong = f"{_few(names)}, must be model.num_classes={model.num_classes}"
  elif found < 2 and "classifier" in config.sections:
    wrong = f"one class, {names[0]!r}; a classifier needs at least 2, each in "
    wrong += "a folder of its own"
  elif channels != model.channels:
    wrong = f"images of {channels} channels, must be model.channels="
    wrong += f"{model.channels}"
  if wrong:
    raise ValueError(f"{where}: {wrong}")
  _LOG.info("data: %s: %d examples of %d classes", where, size, found)
  check_class_names(class_names, names, where)
  checked = CheckedSource(
    source,
    skip=data.bad_images == "skip" and split == "train",
    smallest=model.input_shape[:2] if crops_center(config, split) else (1, 1),
    decode=data.decode,
    is_pixels=not is_latent(config),
  )
  # Training leaves out what it cannot read, evaluation must not: so it is known
  # before the first step that it will not end the run.
  if data.bad_images == "check" or (data.bad_images, split) == ("skip", "val"):
    if bad := checked.read_all(data.num_threads):
      hint = {
        "train": ", or leave them out with data.bad_images='skip'",
        "val": ": data.bad_images='skip' is for training images, as accuracies "
        "on fewer images could not be compared",
      }
      raise ValueError(f"{where}: {bad}; remove them{hint[split]}")
  return checked


def _few(names: tuple[str, ...]) -> str:
  """How many classes there are, and the names of the first ones."""
  more = ", ..." * (len(names) > 10)
  return f"{len(names)} classes ({', '.join(names[:10])}{more})"


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


class ClassList(NamedTuple):
  """A file of class names, whose positions are the labels.

  Attributes:
    where: names the file in messages.
    lines: those of it that are not empty.
  """

  where: str
  lines: tuple[str, ...]


def listed_classes(file: str) -> ClassList | tuple[()]:
  """Reads a list of classes; () where `file` is "".

  Args:
    file: a class on each line, such as "n01440764", "n01440764 tench, Tinca
      tinca" or "polar bear"; the data tell whether the first word or all is the
      name. Empty lines are left out.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no text or names no class.
  """
  if not file:
    return ()
  where = f"data.class_list={file!r}"
  try:
    text = read_bytes(file, _MOST_LIST_BYTES).decode()
  except FileNotFoundError as error:
    raise FileNotFoundError(f"{where}: no such file") from error
  except UnicodeDecodeError as error:
    raise ValueError(f"{where}: not UTF-8: {error}") from error
  lines = tuple(line.strip() for line in text.splitlines() if line.strip())
  if not lines:
    raise ValueError(f"{where}: names no class")
  return ClassList(where, lines)


def match_classes(
  found: tuple[str, ...],
  wanted: tuple[str, ...] | ClassList,
  where: str,
  *,
  are_labels: bool = False,
) -> tuple[tuple[str, ...], list[int]]:
  """Finds the labels of class folders among a model's classes, by name.

  Folders that are named by numbers, as those of ImageNet-V2, are labels
  themselves, or where the classes have such names too, the class of that value:
  leading zeros do not matter.

  Args:
    found: names of the folders.
    wanted: classes of the model, or a list of them, of which the first word of
      a line is the name where the whole line is not in `found`.
    where: name of the data, for the message.
    are_labels: `found` are the labels from 0 on, not names.

  Returns:
    The wanted classes, and the label of each folder.

  Raises:
    ValueError: a folder is none of the classes, two are the same one, or a list
      has one twice.
  """
  whose, origin = "the model's", ", the names of the training's folders"
  if isinstance(wanted, ClassList):
    whose, origin = "the", f" of {wanted.where}"
    names = tuple(n if n in found else n.split()[0] for n in wanted.lines)
    if twice := [name for name in names if names.count(name) > 1]:
      raise ValueError(f"{wanted.where}: class {twice[0]!r} is there twice")
    wanted = names
  if are_labels:
    if len(found) > len(wanted):
      raise ValueError(
        f"{where}: label {found[-1]} is none of {whose} {_few(wanted)}{origin}"
      )
    return wanted, [*range(len(found))]
  if found == wanted:  # also where some classes have one name
    return wanted, [*range(len(found))]
  for names in (found, wanted):
    if twice := [n for n in found if names.count(n) > 1]:
      raise ValueError(
        f"{where}: class {twice[0]!r} may be several of {whose} classes{origin}"
      )
  labels = {name: label for label, name in enumerate(wanted)}
  if any(name not in labels for name in found) and all(
    map(str.isdecimal, found)
  ):
    values = {int(n): i for i, n in enumerate(wanted) if n.isdecimal()}
    values = values or dict(enumerate(range(len(wanted))))
    labels = {n: values[int(n)] for n in found if int(n) in values}
    if len(set(labels.values())) < len(labels):
      raise ValueError(f"{where}: class folders {found} have a number twice")
  if unknown := [name for name in found if name not in labels]:
    raise ValueError(
      f"{where}: class folder {unknown[0]!r} is none of {whose} "
      f"{_few(wanted)}{origin}"
    )
  if missing := len(wanted) - len(set(found)):
    _LOG.warning("%s: no folder of %d classes", where, missing)
  return wanted, [labels[name] for name in found]


class CheckedSource:
  """A source whose bad images raise, or are replaced by the next good one.

  The replacement depends on the index alone, so a stream keeps its length and
  its positions whatever images are bad.
  """

  def __init__(
    self,
    source: Any,
    *,
    skip: bool,
    smallest: tuple[int, int] = (1, 1),
    decode: str = "exact",
    is_pixels: bool = True,
  ):
    """Wraps a source.

    Args:
      source: source that raises ValueError or FileNotFoundError for an example
        that it cannot read.
      skip: whether bad images are replaced; otherwise they raise.
      smallest: minimum rows and columns of an image.
      decode: `data.decode`, which changes pixels and so the identity.
      is_pixels: images are uint8 [rows, columns, channels]; latents are not.
    """
    self._source, self._skip, self._smallest = source, skip, smallest
    self._decode, self._is_pixels = decode, is_pixels
    self._bad: dict[int, object] = {}

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):  # of this object, which pickle is making
      raise AttributeError(name)
    return getattr(self._source, name)

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    found = self._source.identity()
    # "exact" goes unsaid, as in checkpoints from before there was a choice.
    return found | ({"decode": self._decode} if self._decode != "exact" else {})

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Example:
    return self.fitted(index)

  def fitted(
    self, index: int, fit: Callable[[Example], Example] | None = None
  ) -> Example:
    """An example after `fit`, which may raise for an image that is damaged.

    Args:
      index: of the image, which with `fit` is a file.
      fit: maps {"image", "label"}; "image" may be a `LaterImage`.
    """
    read = self._source.later if fit else self._source.__getitem__
    size = len(self._source)
    for step in range(size):
      candidate = (index + step) % size
      try:
        with DECODING_MEMORY.held():
          example = self._checked(read, candidate)
          return fit(example) if fit else example
      except (ValueError, FileNotFoundError) as error:
        if not self._skip:
          raise
        # `setdefault` is atomic, so exactly one of several threads warns.
        token = object()
        if self._bad.setdefault(candidate, token) is token:
          _LOG.warning("skipped %s (%d so far)", error, len(self._bad))
    raise ValueError(f"none of the {size} images can be read")

  def read_all(self, threads: int) -> str:
    """Reads every example once.

    Args:
      threads: number of threads that read.

    Returns:
      A message that names those that cannot be read, "" where all can.
    """

    def error(index: int) -> str:
      try:
        self._checked(self._source.__getitem__, index)
      except (ValueError, FileNotFoundError) as bad:
        return str(bad)
      return ""

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      bad = list(filter(None, pool.map(error, range(len(self)))))
    named = "; ".join(bad[:_MOST_NAMED])
    if (more := len(bad) - _MOST_NAMED) > 0:
      named += f"; and {more} more"
    what = f"{len(bad)} of {len(self)} images cannot be used: {named}"
    return what if bad else ""

  def _checked(self, read: Callable[[int], Example], index: int) -> Example:
    """An example that is large enough, of one of the classes."""
    try:
      example = read(index)
      label, classes = example["label"], len(self._source.class_names)
      label, image = operator.index(label), example["image"]
      shape = tuple(image.shape)
      dtype = getattr(image, "dtype", np.uint8)  # a `LaterImage` has none
    except (OSError, ValueError, MemoryError):
      raise
    except Exception as error:  # of another package's code; is not skipped
      raise OSError(
        f"example {index} of the data: {type(error).__name__}: {error}"
      ) from error
    channels = self._source.channels
    if self._is_pixels and (dtype != np.uint8 or shape[2:] != (channels,)):
      raise ValueError(
        f"example {index} of the data: {dtype} {shape}, must be uint8 [rows, "
        f"columns, {channels}]"
      )
    if not 0 <= label < classes:
      name = self._source.name(index)
      raise ValueError(f"{name}: label={label} must be in [0, {classes - 1}]")
    smallest = self._smallest
    if self._is_pixels and (shape[0] < smallest[0] or shape[1] < smallest[1]):
      raise ValueError(
        f"{self._source.name(index)}: {shape[0]} x {shape[1]} pixels (rows x "
        f"columns), at least {smallest[0]} x {smallest[1]} needed"
      )
    return {**example, "label": np.int32(label)}


def read_ahead(
  read: Callable[[int], Any], places: Iterable[int], threads: int, ahead: int
) -> Iterator[Any]:
  """Reads examples on threads, at most `ahead` of them before their turn."""
  import grain  # imports JAX

  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
  dataset = grain.MapDataset.source(list(places)).map(read)
  return iter(dataset.to_iter_dataset(options))


class SharedReads:
  """What threads read for one another: the first that asks for it loads it.

  The results that were used last are kept. After a failure the next one loads.
  """

  def __init__(
    self,
    most: int,
    load: Callable[[Any], Any],
    size: Callable[[Any, Any], int] = lambda key, result: 1,
  ):
    """Holds nothing yet.

    Args:
      most: results that are kept, or the sum of their sizes; the newest is.
      load: makes the result of a key.
      size: (key, result) -> what counts of it.
    """
    self._given, self._lock = (most, load, size), threading.Lock()
    self._kept: dict[Hashable, tuple] = {}  # the last used is the last

  def __reduce__(self) -> tuple:
    return SharedReads, self._given  # a worker has its own

  def get(self, key: Hashable) -> Any:
    """The result of a key."""
    most, load, size = self._given
    with self._lock:
      place = self._kept.pop(key, None) or (threading.Lock(), [])
      self._kept[key] = lock, found = place
    with lock:
      if not found:
        found.append((result := load(key), size(key, result)))
    with self._lock:
      sizes = {k: x[0][1] for k, (_, x) in self._kept.items() if x}
      total = sum(sizes.values())
      for old in list(sizes)[:-1]:
        if total <= most:
          break
        del self._kept[old]
        total -= sizes[old]
    return found[0][0]
