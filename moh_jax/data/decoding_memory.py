"""A bound on what the threads of a process decode at the same time.

A large image takes more than a gigabyte, so a few of them on many threads would
take more than most machines have.
"""

import contextlib
import threading
from collections.abc import Iterator


class MemoryBudget:
  """Bytes that the threads of a process reserve before they use them.

  A reservation that is larger than the budget waits until there is no other. A
  thread that holds one does not wait for more, lest two wait for each other.
  """

  def __init__(self, size: int):
    """Makes a budget of `size` bytes."""
    self._size, self._reserved = size, 0
    self._turn, self._changed = threading.Lock(), threading.Condition()
    self._own = threading.local()  # how deep a thread is in blocks, its bytes

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """The thread gives back what it reserves in this block when the block ends.

    For code that decodes one image and makes it smaller.
    """
    depth, mine = getattr(self._own, "state", (0, 0))
    self._own.state = depth + 1, mine
    try:
      yield
    finally:
      mine = self._own.state[1]
      self._own.state = depth, mine if depth else 0
      if not depth:
        with self._changed:
          self._reserved -= mine
          self._changed.notify_all()

  @contextlib.contextmanager
  def reserved(self, size: int) -> Iterator[None]:
    """Waits for `size` bytes.

    They are given back at the end of this block, or of `held` around it.
    """
    with self.held():
      depth, mine = self._own.state
      # First come, first served, so that large ones do not wait for ever.
      with contextlib.nullcontext() if mine else self._turn, self._changed:
        self._changed.wait_for(
          lambda: (
            mine or not self._reserved or self._reserved + size <= self._size
          )
        )
        self._reserved += size
      self._own.state = depth, mine + size
      yield


# A larger image takes more than a gigabyte.
MOST_PIXELS = 89_478_485
# Eight JPEG photographs of 12 million pixels, by simplejpeg.
DECODING_MEMORY = MemoryBudget(1 << 30)
