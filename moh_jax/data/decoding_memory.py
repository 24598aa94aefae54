"""A bound on what the threads of a process decode at the same time.

A large image takes more than a gigabyte, so a few of them on many threads would
take more than most machines have.
"""

import contextlib
import threading
from collections.abc import Iterator


class Room:
  """Memory that threads share.

  What is larger than all of it has its place alone. A thread that has some does
  not wait for more, lest two of them wait for each other.
  """

  def __init__(self, size: int):
    """Makes room for `size` bytes."""
    self._size, self._taken = size, 0
    self._turn, self._changed = threading.Lock(), threading.Condition()
    self._own = threading.local()  # how deep a thread is in blocks, its bytes

  @contextlib.contextmanager
  def kept(self) -> Iterator[None]:
    """What the thread takes in the block is its until the block ends.

    For what decodes one image and makes it smaller.
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
          self._taken -= mine
          self._changed.notify_all()

  @contextlib.contextmanager
  def taken(self, size: int) -> Iterator[None]:
    """Waits for `size` bytes."""
    with self.kept():
      depth, mine = self._own.state
      # Others that came later queue for the turn, so what is large gets one.
      with contextlib.nullcontext() if mine else self._turn, self._changed:
        self._changed.wait_for(
          lambda: mine or not self._taken or self._taken + size <= self._size
        )
        self._taken += size
      self._own.state = depth, mine + size
      yield


# A larger image takes more than a gigabyte.
MOST_PIXELS = 89_478_485
# Photographs of 12 million pixels go by eights, thumbnails without waiting.
DECODING = Room(1 << 30)
