"""Processes that work for this one, and end with it."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from moh_jax.runtime.signals import StoppedError


class _Pool(ProcessPoolExecutor):
  """A pool whose processes never see Ctrl-C: it is for the one that asks."""

  def submit(self, *args: Any, **kwargs: Any) -> Future:
    """As that of `Executor`; it starts a process where one is missing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
      return super().submit(*args, **kwargs)
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def process_pool(
  count: int, begin: Callable[..., None] | None = None, *args: Any
) -> Iterator[Executor]:
  """A pool of new processes, which end with this one, also if it is killed.

  Where its block is stopped by a signal, so are they, whatever they do.

  Args:
    count: number of processes.
    begin: called in each of them first.
    *args: of `begin`.
  """
  others = {child.pid for child in multiprocessing.active_children()}
  spawn = multiprocessing.get_context("spawn")
  pool = _Pool(count, spawn, initializer=_begin, initargs=(begin, args))
  try:
    yield pool
  except (KeyboardInterrupt, StoppedError):
    for child in multiprocessing.active_children():
      if child.pid not in others:
        child.terminate()
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
  def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=end_with_parent, daemon=True).start()
  if begin is not None:
    begin(*args)
