"""What threads read for one another: the first that asks for it loads it."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Any


class SharedReads:
  """The results that were used last; a failure is for those who wait for it."""

  def __init__(
    self,
    most: int,
    size: Callable[[Hashable, Any], int],
    uses: int = 0,
  ):
    """Holds nothing yet.

    Args:
      most: sum of the sizes of the results that are kept. The last one is kept
        whatever its size.
      size: of a result, from its key and itself.
      uses: drops a result that was asked for so often; 0 is never.
    """
    self._most, self._size, self._uses = most, size, uses
    self._lock = threading.Lock()
    # Results, or their loading, and how often they were asked for; the last
    # used at the end.
    self._kept: collections.OrderedDict[
      Hashable, tuple[concurrent.futures.Future, int]
    ] = collections.OrderedDict()

  def __reduce__(self) -> tuple:
    return SharedReads, (self._most, self._size, self._uses)  # a worker's own

  def __len__(self) -> int:
    return len(self._kept)

  def get(self, key: Hashable, load: Callable[[], Any]) -> Any:
    """The result of a key; `load` makes it."""
    with self._lock:
      read, uses = self._kept.pop(key, (None, 0))
      is_first = read is None
      if read is None:
        read = concurrent.futures.Future()
      if uses + 1 != self._uses:
        self._kept[key] = read, uses + 1
    if is_first:
      try:
        read.set_result(load())
      except BaseException as error:
        read.set_exception(error)
      self._forget()
    return read.result()

  def _forget(self) -> None:
    """Drops failures, and what was used longest ago where it is too much."""
    with self._lock:
      sizes = {}
      for key, (read, _) in list(self._kept.items()):
        if read.done() and read.exception():
          del self._kept[key]
        elif read.done():
          sizes[key] = self._size(key, read.result())
      total = sum(sizes.values())
      for key, size in sizes.items():
        if total <= self._most or len(self._kept) == 1:
          return
        del self._kept[key]
        total -= size
