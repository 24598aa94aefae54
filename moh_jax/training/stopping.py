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

from moh_jax import signals

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
# How often the processes have compared notes. JAX wants a number that grows,
# also over several runs of one process.
_ticks = itertools.count(1)


class StopNowError(Exception):
  """A stop was asked for during work that need not be finished."""


class StopRequest:
  """Whether a stop was asked for; for runs of one process."""

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

  def reached(self) -> bool:
    """Whether to stop here; all processes of a run ask equally often."""
    return bool(self)

  def run(self, work: Callable[[], T]) -> T | None:
    """Does work that changes nothing; None if a stop comes before its end."""
    if self:
      return None
    token = _current.set(self)
    try:
      self._interruptible = True
      try:
        return work()
      finally:
        self._interruptible = False
    except StopNowError:
      return None
    finally:
      _current.reset(token)


class _SharedRequest(StopRequest):
  """Whether a stop was asked for in any process of a run.

  JAX's own handler of SIGTERM tells the other processes, and they agree on the
  next call of `reached` that is still ahead of all of them.
  """

  def reached(self) -> bool:
    """See the base class."""
    if not self and multihost.reached_preemption(next(_ticks)):
      self._requested.set()
    return bool(self)


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


def no_signals() -> StopRequest:
  """The request of a run that has nothing to save yet.

  Several processes agree from the start, as JAX handles their signals.
  """
  return StopRequest() if jax.process_count() == 1 else _SharedRequest()


@contextlib.contextmanager
def stop_request(before: StopRequest) -> Iterator[StopRequest]:
  """Turns the first SIGTERM or SIGINT into a request; a second interrupts.

  With several processes there is nothing to do: JAX handles SIGTERM.

  Args:
    before: of `no_signals`.
  """
  if jax.process_count() > 1:
    yield before
    return
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
  if in_main_thread:
    stack.enter_context(signals.deferred())
    for number in (signal.SIGTERM, signal.SIGINT):
      previous[number] = signal.signal(number, handle)
    if signals.stop_was_asked():
      request.ask()
  with stack:
    stack.callback(restore)
    yield request
