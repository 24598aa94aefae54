"""Encoded images in shards, as `pack-images` writes and training reads.

The header of a record is {"label": 3, "name": "ant/1.jpg"}; the payload is the
unchanged image file. metadata.json has the fields "class_names", "images" (a
fingerprint of the list of files) and "packed_from".
"""

import pathlib

from moh_jax.data.identity import Identity
from moh_jax.data.images.encoded import EncodedSource, Record
from moh_jax.data.shards import Shards

KIND = "images"


class ArrayRecordSource(EncodedSource):
  """Source of the images in PATH/SPLIT/*.array_record."""

  def __init__(self, path: str, split: str, channels: int):
    """Opens a split.

    Args:
      path: directory of the splits, local or mounted.
      split: "train" or "val"; "" reads `path` itself.
      channels: 1 decodes to grey, 3 to RGB.

    Raises:
      FileNotFoundError: metadata.json or a shard is missing.
      ValueError: the set holds no images, or a shard is truncated.
    """
    self._folder = pathlib.Path(path) / split
    self._shards = Shards(self._folder, KIND)
    self.class_names = tuple(self._shards.metadata["class_names"])
    self.channels = channels

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images, see `files.fingerprint`."""
    return self._shards.metadata["images"]

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    return self._shards.identity()

  def __len__(self) -> int:
    return len(self._shards)

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    header, content = self._shards[index]
    place = f"{header['name']} in {self._folder}"
    return Record(header["label"], place, content)

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"; shard and position if the record is damaged."""
    try:
      return self._shards[index][0]["name"]
    except ValueError:
      return self._shards.locate(index)
