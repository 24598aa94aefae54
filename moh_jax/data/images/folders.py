"""Folders of image files: their splits, classes and held-out share."""

import functools
import hashlib
import logging
import os
from collections.abc import Iterable

from etils import epath

SPLITS = ("train", "val")
# Words in the names of files or folders, and the split that they mean.
SPLIT_WORDS = {
  **dict.fromkeys(("train", "training"), "train"),
  **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
  **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Formats that Pillow knows, but decodes with other programs or not at all.
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
FLAT_CLASS = "images"  # the one class of a folder without class folders
_LOG = logging.getLogger(__name__)

# "CLASS/NAME" (or "NAME" in a flat folder) and label of each image.
Files = list[tuple[str, int]]


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
  names, others = [], []
  for name in classes:
    images, rest = _file_names(root / name)
    names.append([f"{name}/{file}" for file in images])
    others += [f"{name}/{file}" for file in rest]
  beside, rest = _file_names(root)
  if classes:
    others += beside  # a list of classes, say, may stand there too
  else:
    classes, names, others = [FLAT_CLASS], [beside], rest
  if others:
    _warn_of_others(str(root), len(others), others[0], _SUFFIXES)
  if not any(names):
    raise FileNotFoundError(
      f"{root} holds no image; expected {root}/CLASS/*, or images without "
      f"classes, with a suffix in {_SUFFIXES} (shards and tables: set "
      "data.source)"
    )
  if empty := [name for name, found in zip(classes, names) if not found]:
    raise ValueError(
      f"{root}: class folder {', '.join(map(repr, empty[:10]))} holds no image "
      f"with a suffix in {_SUFFIXES}; add some, or remove the folder"
    )
  files = [(file, label) for label, found in enumerate(names) for file in found]
  return tuple(classes), files


def list_split(
  path: str | os.PathLike, split: str, val_share: float = 0.0
) -> tuple[epath.Path, tuple[str, ...], Files]:
  """Lists the images of one split of a directory.

  Args:
    path: directory with train/ and val/, or with the images of both, see
      `list_images`.
    split: "train" or "val".
    val_share: share of the images that is held out as "val" where there is no
      val/. A hash of an image's name decides, so that further images move none
      from one split to the other.

  Returns:
    The folder, the class names, and the files of the split.

  Raises:
    FileNotFoundError: there is no such split, or no image.
    ValueError: a class folder holds no image, or a split would be left without.
  """
  root = epath.Path(path)
  if not root.is_dir():
    raise FileNotFoundError(f"data.path={str(path)!r}: no such directory")
  found = find_splits(root)
  divided = "train" in found and "val" not in found and val_share > 0
  name = "train" if divided else split
  if name not in found:
    hint = ", or data.val_share above 0" if "train" in found else ""
    raise FileNotFoundError(
      f"data.path={str(path)!r} has no directory {split!r}; expected "
      f"{path}/{split}/CLASS/*.jpg{hint}"
    )
  folder = found[name]
  class_names, files = list_images(folder)
  if divided:
    every = {label for _, label in files}
    files = [
      (file, label)
      for file, label in files
      if is_held_out(file, val_share) == (split == "val")
    ]
    present = {label for _, label in files}
    check_share(folder, class_names, every, present, split, val_share)
  return folder, class_names, files


def is_held_out(name: str, share: float) -> bool:
  """Whether an image belongs to the held-out share, by a hash of its name."""
  digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
  return int.from_bytes(digest[:8], "big") < share * 2**64


def check_share(
  folder: os.PathLike,
  class_names: tuple[str, ...],
  every: set[int],
  present: set[int],
  split: str,
  share: float,
) -> None:
  """Refuses a held-out share that leaves nothing to train on or to evaluate.

  Args:
    folder: for messages.
    class_names: of all classes.
    every: labels that both splits together have.
    present: labels that the split has.
    split: "train" or "val".
    share: `data.val_share`.

  Raises:
    ValueError: training lacks a class, or nothing is held out.
  """
  missing = [class_names[label] for label in sorted(every - present)]
  what = f"{folder}: data.val_share={share} holds out"
  if split == "train" and missing:
    raise ValueError(
      f"{what} every image of class {missing[0]!r}; add images, or make train/ "
      "and val/"
    )
  if not present:
    raise ValueError(f"{what} no image; add images, or raise it")
  if missing:
    _LOG.warning("%s no image of %d classes", what, len(missing))


def fingerprint(files: Files) -> str:
  """Identifies a list of images and labels: its length and a hash of names."""
  digest = hashlib.sha256()
  for name, label in files:
    digest.update(f"{label} {name}\n".encode(errors="surrogateescape"))
  return f"{len(files)} files, sha256 {digest.hexdigest()[:16]}"


def find_files(folder: str | os.PathLike, *, warn: bool = False) -> list[str]:
  """Paths of the images in a folder and all below it, in order.

  Args:
    folder: local; images are of any format that Pillow decodes, by suffix.
    warn: whether to warn of other files that are not hidden.

  Raises:
    FileNotFoundError: there is none.
  """
  suffixes, paths, others = _decoded_suffixes(), [], []
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


@functools.cache
def _decoded_suffixes() -> tuple[str, ...]:
  """Suffixes of the formats that Pillow decodes."""
  from PIL import Image  # takes a while, and help needs none

  known = Image.registered_extensions().items()
  kinds = Image.OPEN.keys() - _NOT_DECODED
  return tuple(sorted(suffix for suffix, kind in known if kind in kinds))


def find_images(paths: Iterable[str]) -> list[str]:
  """Image files: those given, and all in and below the folders given.

  Raises:
    FileNotFoundError: a folder holds none.
  """
  found = []
  for path in paths:
    found += find_files(path, warn=True) if os.path.isdir(path) else [path]
  return found


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
  root = epath.Path(root)
  folders = {path.name: path for path in _folders(root)}
  # A class may be called "train" too: beside other classes, it is a split only
  # if it does not hold image files alone.
  only = {name.lower() for name in folders} <= SPLIT_WORDS.keys()
  found = {
    name: folders[name]
    for name in SPLITS
    if name in folders and (only or _is_split(folders[name]))
  }
  if not found:
    return {split or SPLITS[0]: root}
  if split is None:
    return found
  if split not in found:
    raise FileNotFoundError(
      f"{root} has no split {split!r}, only {sorted(found)}"
    )
  return {split: found[split]}


def has_class_images(root: str | os.PathLike) -> bool:
  """Whether a directory has class folders, and all of them hold images.

  Raises:
    FileNotFoundError: there is no such directory.
  """
  splits = find_splits(root).values()
  classes = [folder for split in splits for folder in _folders(split)]
  return bool(classes) and all(_file_names(folder)[0] for folder in classes)


def _is_split(folder: epath.Path) -> bool:
  """Whether a folder holds classes or packed images."""
  return any(
    entry.is_dir() or entry.name == "metadata.json"
    for entry in folder.iterdir()
  )


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
