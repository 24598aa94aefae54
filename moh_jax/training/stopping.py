"""Requests to stop a run: SIGTERM and SIGINT."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from moh_jax import signals

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class StopNowError(Exception):
  """A stop was asked for during work that need not be finished."""


class StopRequest:
  """Whether a stop was asked for."""

  def __init__(self):
    self._requested = threading.Event()
    self._interruptible = False

  def __bool__(self) -> bool:
    return self._requested.is_set()

  def ask(self) -> None:
    """Asks for a stop; raises where the work may be interrupted."""
    self._requested.set()
    if self._interruptible:
      raise StopNowError

  def run(self, work: Callable[[], T]) -> T | None:
    """Does work that changes nothing; None if a stop comes before its end."""
    if self:
      return None
    try:
      self._interruptible = True
      try:
        return work()
      finally:
        self._interruptible = False
    except StopNowError:
      return None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
  """Turns the first SIGTERM or SIGINT into a request; a second interrupts.

  With several processes it stays out of the way: there JAX's own handler
  agrees with the other processes on the step to stop at.
  """
  request, previous = StopRequest(), {}
  stack = contextlib.ExitStack()

  def restore() -> None:
    while previous:
      signal.signal(*previous.popitem())

  def handle(number: int, _: Any) -> None:
    name = signal.Signals(number).name
    _LOG.warning("%s: saving after this step, then stopping", name)
    restore()
    request.ask()

  in_main_thread = threading.current_thread() is threading.main_thread()
  if in_main_thread and jax.process_count() == 1:
    stack.enter_context(signals.deferred())
    for number in (signal.SIGTERM, signal.SIGINT):
      previous[number] = signal.signal(number, handle)
    if signals.stop_was_asked():
      request.ask()
  with stack:
    stack.callback(restore)
    yield request
