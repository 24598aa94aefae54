"""Encoded images in shards, as `pack-images` writes and training reads.

The header of a record is {"label": 3, "name": "ant/1.jpg"}; the payload is the
unchanged image file. metadata.json has the fields "class_names", "images" (a
fingerprint of the list of files) and "packed_from".
"""

import pathlib
from typing import Any

import numpy as np

from moh_jax.data.identity import Identity
from moh_jax.data.images.files import decode_image, describe_image
from moh_jax.data.shards import Shards

KIND = "images"


class ArrayRecordSource:
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

  def read(self, index: int) -> tuple[dict[str, Any], bytes]:
    """The record of an example, its image not decoded."""
    return self._shards[index]

  def __getitem__(self, index: int) -> dict[str, Any]:
    header, content = self.read(index)
    image = decode_image(content, self.channels, self._place(header))
    return {"image": image, "label": np.int32(header["label"])}

  def describe(self, index: int) -> tuple[tuple[int, int], bool]:
    """Rows and columns of an image, and whether it is grey."""
    header, content = self.read(index)
    return describe_image(content, self._place(header))

  def _place(self, header: dict[str, Any]) -> str:
    return f"{header['name']} in {self._folder}"

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"; shard and position if the record is damaged."""
    try:
      return self._shards[index][0]["name"]
    except ValueError:
      return self._shards.locate(index)
