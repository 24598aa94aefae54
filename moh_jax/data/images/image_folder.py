"""Images in folders, one for each class."""

import os

from etils import epath

from moh_jax.data.identity import Identity, of_files
from moh_jax.data.images.classes import ClassList, match_classes
from moh_jax.data.images.encoded import EncodedSource, Record
from moh_jax.data.images.files import read_bytes
from moh_jax.data.images.folders import fingerprint, list_images, list_split


class ImageFolderSource(EncodedSource):
  """Source of the image files of a split, see `folders.list_split`."""

  def __init__(
    self,
    path: str,
    split: str,
    channels: int,
    *,
    val_share: float = 0.0,
    class_names: tuple[str, ...] | ClassList = (),
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
      where = str(self._root)
      self.class_names, labels = match_classes(own, class_names, where)
      self._files = [(name, labels[label]) for name, label in self._files]

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images, see `files.fingerprint`."""
    return fingerprint(self._files)

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
    return Record(label, str(path), read_bytes(path))

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"."""
    return self._files[index][0]
