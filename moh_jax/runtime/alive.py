"""Says that long silent work goes on."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

_LOG = logging.getLogger(__name__)
_SECONDS = 8.0  # between two lines


@contextlib.contextmanager
def alive(what: str) -> Iterator[None]:
  """A block that logs a line every 8 seconds, "still WHAT"."""
  done, began = threading.Event(), time.monotonic()

  def tell() -> None:
    while not done.wait(_SECONDS):
      _LOG.warning("still %s, %.0f s", what, time.monotonic() - began)

  thread = threading.Thread(target=tell, daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
