"""Requests to stop a run: SIGTERM and SIGINT."""

import contextlib
import contextvars
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from orbax.checkpoint import multihost

from moh_jax.runtime import signals

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
# How often the processes have compared notes. JAX wants a number that grows,
# also over several runs of one process.
_ticks = itertools.count(1)


class StopNowError(Exception):
  """A stop was asked for during work that need not be finished."""


class StopRequest(contextlib.ExitStack):
  """Whether a stop was asked for, in any process of the run.

  A block of a whole run, also of one that goes back, so that no step loses it.
  With several processes JAX's own handler of SIGTERM tells the others, and they
  agree on the next call of `reached` that is still ahead of all of them.
  """

  def __init__(self):
    super().__init__()
    self._requested = threading.Event()
    self._shared = jax.process_count() > 1
    self._previous: dict[int, Any] | None = None  # handlers of signals

  def begin(self) -> None:
    """Turns the first SIGTERM or SIGINT into a request; a second interrupts.

    Before, a signal ends the command: a run has nothing to save yet. With
    several processes JAX handles the signals from the start.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if self._previous is not None or self._shared or not in_main:
      return
    self.enter_context(signals.deferred())
    self.callback(self._restore)
    self._previous = {
      number: signal.signal(number, self._handle)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
    if signals.stop_was_asked():
      self._requested.set()

  def _handle(self, number: int, _: Any) -> None:
    name = signal.Signals(number).name
    _LOG.warning("%s: saving after this step, then stopping", name)
    self._restore()
    self._requested.set()

  def _restore(self) -> None:
    while self._previous:
      signal.signal(*self._previous.popitem())

  def __bool__(self) -> bool:
    return self._requested.is_set()

  def reached(self) -> bool:
    """Whether to stop here; all processes of a run ask equally often."""
    if self._shared and not self:
      if multihost.reached_preemption(next(_ticks)):
        self._requested.set()
    return bool(self)

  def run(self, work: Callable[[], T]) -> T | None:
    """Does work that changes nothing; None if a stop comes before its end."""
    if self:
      return None
    token = _current.set(self)
    try:
      return work()
    except StopNowError:
      return None
    finally:
      _current.reset(token)


_current: contextvars.ContextVar[StopRequest | None] = contextvars.ContextVar(
  "stop_request", default=None
)


def interruptible(parts: Iterable[T]) -> Iterator[T]:
  """The parts of work under `StopRequest.run`, which a stop may end between.

  Args:
    parts: equally many in every process of the run.

  Raises:
    StopNowError: a stop was asked for.
  """
  request = _current.get()
  for part in parts:
    if request is not None and request.reached():
      raise StopNowError
    yield part
