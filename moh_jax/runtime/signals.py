"""SIGTERM and SIGINT end a command in one line; a second one ends it at once.

Python runs its signal handlers between its own instructions, so not while XLA
compiles or a program runs, and C++ code that calls Python may drop what they
raise (JAX does at times, while it traces). A thread therefore reads the signals
too, and long work asks `stop_was_asked`.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
# How long the main thread may take to notice a first signal that it handles
# itself, and how long to end then, before the thread ends the process.
_PATIENCE_SECONDS = 5.0, 10.0
# Functions whose errors Python drops, and how long it then takes to try again.
_DROPPING, _AGAIN_SECONDS = ("__del__", "_xla_gc_callback"), 0.02
_asked = threading.Event()
_deferred = threading.Event()


class StoppedError(BaseException):
  """A signal asked the command to end.

  It is no `Exception`, so that code which catches those does not swallow it.

  Attributes:
    number: number of the signal.
  """

  def __init__(self, number: int):
    super().__init__(f"stopped by {signal.Signals(number).name}")
    self.number = number

  @property
  def status(self) -> int:
    """The exit status that shells expect."""
    return 128 + self.number


def stop_was_asked() -> bool:
  """Whether a signal came in the block of `handled` that is under way."""
  return _asked.is_set()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """A block that handles a first signal itself, and takes its time."""
  _deferred.set()
  try:
    yield
  finally:
    _deferred.clear()


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """Handles signals in its block; does nothing outside of the main thread."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  left = threading.Event()

  def stop(number: int, frame: FrameType | None) -> None:
    _asked.set()
    if not _is_dropped(frame):
      raise StoppedError(number)
    signal.signal(signal.SIGALRM, lambda _, later: stop(number, later))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

  before = {number: signal.signal(number, stop) for number in _NUMBERS}
  before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
  wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  watcher = threading.Thread(target=_watch, args=(reader, left), daemon=True)
  watcher.start()
  try:
    yield
  finally:
    left.set()
    _asked.clear()  # what runs afterwards in this process was not asked to stop
    signal.set_wakeup_fd(wakeup)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
      signal.signal(number, handler)
    writer.close()
    watcher.join()
    reader.close()


def _is_dropped(frame: FrameType | None) -> bool:
  """Whether Python prints and drops what is raised here."""
  while frame is not None and frame.f_code.co_name not in _DROPPING:
    frame = frame.f_back
  return frame is not None


def _watch(reader: socket.socket, left: threading.Event) -> None:
  """Counts signals; ends the process at the second, or if one has no effect."""
  seen = 0
  while received := reader.recv(1):
    number = received[0]
    if number not in _NUMBERS:
      continue
    seen += 1
    if seen > 1:
      _leave(number, "at once")
    if not _deferred.is_set():
      threading.Thread(
        target=_leave_unless, args=(number, left), daemon=True
      ).start()


def _leave_unless(number: int, left: threading.Event) -> None:
  for event, seconds in zip((_asked, left), _PATIENCE_SECONDS):
    if not event.wait(seconds) and not left.is_set():
      if event is left and _deferred.is_set():  # it looked, and ends by itself
        return
      _leave(number, "during a computation")


def _leave(number: int, how: str) -> NoReturn:
  line = f"error: stopped by {signal.Signals(number).name}, {how}\n"
  os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
  os._exit(128 + number)
