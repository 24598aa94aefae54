"""Repeated augmentation: epochs in which each image comes several times."""

from typing import Any

import grain

from moh_jax.data.images.shared_reads import SharedReads

_EPOCH_STEP = 256  # examples: the length of an epoch is a multiple of it
_MOST_KEPT = 32  # images that wait for their next copy


class RepeatedImages(grain.MapDataset):
  """Copies of each image one after the other (arXiv:1901.09335).

  An epoch is the beginning of a shuffled one, as long as that rounded down to a
  multiple of 256: the order over all processes, and the length, of the sampler
  of DeiT and timm. An image is read once for the copies that a process needs at
  about the same time, so they share its arrays, which nobody may write to.
  """

  def __init__(self, parent: grain.MapDataset, copies: int):
    """Repeats examples.

    Args:
      parent: shuffled examples; index i + k * len(parent) is example i of epoch
        k.
      copies: of each example.
    """
    super().__init__(parent)
    self._copies, images = copies, len(parent)
    self._length = images // _EPOCH_STEP * _EPOCH_STEP or images
    self._reads = SharedReads(_MOST_KEPT, _one, copies)

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> Any:
    epoch, place = divmod(index, self._length)
    number = epoch * len(self._parent) + place // self._copies
    return self._reads.get(number, lambda: self._parent[number])


def _one(number: int, image: Any) -> int:
  return 1
