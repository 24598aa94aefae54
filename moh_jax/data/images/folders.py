"""Folders of image files: their splits, classes and held-out share."""

import functools
import hashlib
import logging
import os
from collections.abc import Iterable

from etils import epath

SPLITS = ("train", "val")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
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
    ValueError: a class folder holds no image.
  """
  root = epath.Path(folder)
  classes = [path.name for path in _folders(root)]
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
    _warn_of_others(str(root), len(others), others[0])
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
    files = [
      (file, label)
      for file, label in files
      if is_held_out(file, val_share) == (split == "val")
    ]
    present = {label for _, label in files}
    check_share(folder, class_names, present, split, val_share)
  return folder, class_names, files


def is_held_out(name: str, share: float) -> bool:
  """Whether an image belongs to the held-out share, by a hash of its name."""
  digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
  return int.from_bytes(digest[:8], "big") < share * 2**64


def check_share(
  folder: os.PathLike,
  class_names: tuple[str, ...],
  present: set[int],
  split: str,
  share: float,
) -> None:
  """Refuses a held-out share that leaves nothing to train on or to evaluate.

  Args:
    folder: for messages.
    class_names: of all classes.
    present: labels that the split has.
    split: "train" or "val".
    share: `data.val_share`.

  Raises:
    ValueError: training lacks a class, or nothing is held out.
  """
  missing = [n for label, n in enumerate(class_names) if label not in present]
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


def find_files(folder: str | os.PathLike) -> list[str]:
  """Paths of the images in a folder and all below it, in order.

  Raises:
    FileNotFoundError: there is none.
  """
  paths = []
  for where, below, _ in os.walk(folder):
    below[:] = [name for name in below if not name.startswith(".")]
    names, _ = _file_names(epath.Path(where))
    paths += [os.path.join(where, name) for name in names]
  if not paths:
    raise FileNotFoundError(
      f"{folder} holds no image with a suffix in {_SUFFIXES}"
    )
  return sorted(paths)


def find_images(paths: Iterable[str]) -> list[str]:
  """Image files: those given, and all in and below the folders given.

  Raises:
    FileNotFoundError: a folder holds none.
  """
  return [
    file
    for path in paths
    for file in (find_files(path) if os.path.isdir(path) else [path])
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
  root = epath.Path(root)
  folders = {path.name: path for path in _folders(root)}
  # A class may be called "train" too: beside other classes, it is a split only
  # if it does not hold image files alone.
  only = set(folders) <= set(SPLITS)
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
  images, others = [], []
  for entry in folder.iterdir():
    if entry.name.startswith("."):
      continue
    if entry.suffix.lower() in _SUFFIXES:
      images.append(entry.name)
    else:
      others.append(entry.name)
  return sorted(images), sorted(others)


@functools.cache  # a run lists its images more than once
def _warn_of_others(root: str, count: int, example: str) -> None:
  _LOG.warning(
    "%s: left out %d files or folders, %r for one; images stand in class "
    "folders, with a suffix in %s",
    root,
    count,
    example,
    _SUFFIXES,
  )
