"""Folders of image files: their splits, classes and held-out share."""

import glob
import math
import os
import pathlib
from collections.abc import Iterable

from moh_jax.config.registry import SPLITS, MissingSplitError
from moh_jax.data.identity import of_files
from moh_jax.data.input_files import SPLIT_WORDS
from moh_jax.data.sources import (
  ALL,
  FLAT_CLASS,
  EncodedSource,
  Record,
  Selection,
  hold_out,
  match_classes,
)
from moh_jax.runtime.alive import alive

_SUFFIXES = (
  *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff"),
  *(".gif", ".avif", ".jp2", ".ppm", ".pgm"),
)


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
      split: "train" or "val"; "" reads `path` itself.
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
      raise FileNotFoundError(
        f"data.path={path!r}: no such directory; --config.data.path=DIR names "
        "yours"
      )
    found = [name for name in SPLITS if split and (root / name).is_dir()]
    divided = bool(split) and "val" not in found and share > 0
    name = "train" if divided else split
    if split and name not in (found or SPLITS[:1]):
      hint = "" if "val" in found else ", or data.val_share above 0"
      raise MissingSplitError(
        f"data.path={path!r} has no directory {split!r}; expected "
        f"{path}/{split}/CLASS/*.jpg{hint}"
      )
    self._root, self.channels = root / name if found else root, channels
    self.class_names, self._files = list_images(self._root)
    if divided:
      names, labels = zip(*self._files)
      chosen = hold_out(names, labels, split, share, self._root)
      self._files = [self._files[i] for i in chosen]
    if selection.class_names:
      self.class_names, labels = match_classes(
        self.class_names, selection.class_names, str(self._root)
      )
      self._files = [(name, labels[label]) for name, label in self._files]

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images: names, labels and sizes."""
    names, labels = zip(*self._files)
    found = of_files(self._root, names, str(labels).encode())
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
def list_images(
  root: pathlib.Path,
) -> tuple[tuple[str, ...], list[tuple[str, int]]]:
  """Lists the images ROOT/CLASS/*, classes by number, then by name.

  A flat folder, of images and no other folders, is one class. What is hidden
  (".name") or no image is left out.

  Returns:
    The class names, and for each file its name below `root` and its label.

  Raises:
    FileNotFoundError: there is no image in it, or in one of its folders.
    ValueError: the folders are splits.
  """
  with os.scandir(root) as entries:
    classes = [
      entry.name
      for entry in entries
      if entry.is_dir() and not entry.name.startswith(".")
    ]
  classes.sort(key=lambda n: (int(n) if n.isdecimal() else math.inf, n))
  if len(classes) > 1 and {n.lower() for n in classes} <= SPLIT_WORDS.keys():
    raise ValueError(
      f"{root}: {', '.join(classes)} are splits, no classes; they must be "
      "called train and val"
    )
  files = []
  for label, name in enumerate(classes or [""]):
    found = sorted(
      file
      for file in os.listdir(root / name)
      if file.lower().endswith(_SUFFIXES) and not file.startswith(".")
    )
    if not found:
      raise FileNotFoundError(
        f"{root / name} holds no image with a suffix in {_SUFFIXES}; expected "
        f"{root}/CLASS/* (of shards and tables set data.source)"
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
    found = [path]
    if os.path.isdir(path):
      below = glob.iglob(f"{glob.escape(path)}/**", recursive=True)  # no hidden
      found = sorted(x for x in below if x.lower().endswith(_SUFFIXES))
    if not found:
      raise FileNotFoundError(
        f"{path} holds no image file with a suffix in {_SUFFIXES}"
      )
    files += found
  return files
