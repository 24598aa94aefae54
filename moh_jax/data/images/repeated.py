"""Repeated augmentation: epochs in which each image comes several times."""

import concurrent.futures
import threading
from typing import Any

import grain

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
    self._lock = threading.Lock()
    self._reads: dict[int, tuple[concurrent.futures.Future, int]] = {}

  def __reduce__(self):  # a lock cannot be sent to a worker process
    return RepeatedImages, (self._parent, self._copies)

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> Any:
    epoch, place = divmod(index, self._length)
    return self._read(epoch * len(self._parent) + place // self._copies)

  def _read(self, index: int) -> Any:
    """Reads an example, or waits for the thread that reads it already."""
    with self._lock:
      read, uses = self._reads.pop(index, (None, 0))
      is_first = read is None
      if read is None:
        read = concurrent.futures.Future()
      if uses + 1 < self._copies:
        self._reads[index] = read, uses + 1
      while len(self._reads) > _MOST_KEPT:
        del self._reads[next(iter(self._reads))]
    if is_first:
      try:
        read.set_result(self._parent[index])
      except BaseException as error:
        read.set_exception(error)
    return read.result()
