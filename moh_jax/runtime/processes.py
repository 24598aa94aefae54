"""The processes of a run: how they join, agree and end.

Importable without JAX.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_stack
from typing import Any

from moh_jax._version import __version__
from moh_jax.runtime.files import differences

VARIABLES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
JOIN_SECONDS = 300  # that all processes have to come in
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_USED = (*_SIGNALS, signal.SIGALRM)  # the last by `_raise`
# Functions in which Python drops what is raised, JAX's among them.
_DROPPING = {"__del__", "_xla_gc_callback"}
# A signal came. Should what it raised be dropped elsewhere, `deferred` knows.
_asked = threading.Event()
_obeyed = signal.SIGTERM  # the last one of `deferred`
_LOG = logging.getLogger(__name__)


def join() -> None:
  """Connects this process to the others; JAX must not have been used before.

  TPU pods, Slurm, Open MPI and Kubernetes tell JAX where the first process
  listens and which process this is; elsewhere `VARIABLES` do.

  Raises:
    ValueError: the place is not known, or the first process is not reached.
  """
  import jax

  address, *numbers = map(os.environ.get, VARIABLES)
  try:
    count, index = (int(text) if text else None for text in numbers)
    if address and index:
      _reach(address)
    jax.distributed.initialize(
      address, count, index, initialization_timeout=JOIN_SECONDS
    )
  except (ValueError, RuntimeError, OSError) as error:
    raise ValueError(
      f"--distributed: {error}; outside TPU pods, Slurm, Open MPI and "
      f"Kubernetes set {', '.join(VARIABLES)}"
    ) from error


def _reach(address: str) -> None:
  """Waits for the first process, without which JAX would abort with a stack."""
  host, _, port = address.rpartition(":")
  deadline = time.monotonic() + JOIN_SECONDS
  while True:
    try:
      socket.create_connection((host.strip("[]"), int(port)), 1).close()
      return
    except OSError as error:
      if time.monotonic() > deadline:
        raise OSError(f"process 0 at {address}: {error}") from error
    time.sleep(0.5)


def ask_first_process(
  question: Callable[[], Sequence[int] | None], length: int = 0
) -> list[int]:
  """What the first process finds on its disk; its error stops all of them.

  Args:
    question: called by the first process alone.
    length: number of its answers, each an int32.

  Raises:
    ValueError: the first process met an error; there, it is that one.
    OSError: on the first process, what `question` raised.
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  error, answer = None, [0] * length
  if jax.process_index() == 0:
    try:
      answer = question() or ()
    except (ValueError, OSError) as caught:
      error = caught
  told = np.array([error is not None, *answer], np.int32)
  told = multihost_utils.broadcast_one_to_all(told)
  if error is not None:
    raise error
  if told[0]:
    raise ValueError("the first process stopped with an error, see there")
  return [int(number) for number in told[1:]]


def agree(values: Mapping[str, Any]) -> None:
  """Checks that all processes of the run have the same values and versions.

  Args:
    values: nested dicts of JSON values, such as a config.

  Raises:
    ValueError: they differ; the message names what does.
  """
  import jax
  import numpy as np
  from flax.traverse_util import flatten_dict
  from jax.experimental import multihost_utils

  if jax.process_count() == 1:
    return
  versions = {"moh_jax": __version__, "jax": jax.__version__}
  ours = flatten_dict({"version": versions, **values}, sep=".")
  text = json.dumps(ours).encode()
  size = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
  padded = np.frombuffer(text.ljust(size), np.uint8)
  first, *others = map(bytes, multihost_utils.process_allgather(padded))
  for index, other in enumerate(others, start=1):
    if found := differences(json.loads(other), json.loads(first)):
      raise ValueError(
        f"process {index} of the run differs from process 0, here and there: "
        f"{found}"
      )


class StoppedError(BaseException):
  """A signal asked the command to end.

  It is no `Exception`, so that code which catches those does not swallow it.

  Attributes:
    status: exit status that shells expect.
  """

  def __init__(self, number: int):
    super().__init__(f"stopped by {signal.Signals(number).name}")
    self.status = 128 + number


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """A block in which SIGTERM and SIGINT raise `StoppedError`.

  A second one ends the process. Python's handlers wait for the end of what C++
  code does, such as compiling a program, so a thread watches for it. Outside of
  the main thread, which alone gets signals, nothing is done.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def watch() -> None:
    seen = 0
    while received := reader.recv(1):
      seen += received[0] in _SIGNALS
      if seen > 1:
        name = signal.Signals(received[0]).name
        os.write(2, f"error: stopped by {name}, at once\n".encode())
        os._exit(128 + received[0])

  reader, writer = socket.socketpair()
  writer.setblocking(False)
  wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    with _handler(_raise):
      yield
  finally:
    _asked.clear()
    signal.set_wakeup_fd(wakeup)
    writer.close()
    watcher.join()
    reader.close()


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
  """A block that gets a function which says whether a first signal came."""
  if threading.current_thread() is not threading.main_thread():
    yield lambda: False
    return

  def ask(number: int, frame: Any) -> None:
    global _obeyed
    if _asked.is_set():
      _raise(number, frame)
    _asked.set()
    _obeyed = signal.Signals(number)
    name = _obeyed.name
    _LOG.warning("%s: saving after this step, then stopping", name)

  try:
    with _handler(ask):
      yield _asked.is_set
  finally:
    _asked.clear()


def stop_status() -> int:
  """Exit status of a command that did as a signal asked: saved and stopped.

  Of several processes JAX asks all on a SIGTERM of one.
  """
  return 128 + _obeyed


@contextlib.contextmanager
def _handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
  before = {number: signal.getsignal(number) for number in _USED}
  for number in _SIGNALS:
    signal.signal(number, handler)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
      signal.signal(number, handler)


def _raise(number: int, frame: Any) -> None:
  _asked.set()
  if _DROPPING.isdisjoint(f.f_code.co_name for f, _ in walk_stack(frame)):
    raise StoppedError(number)
  signal.signal(signal.SIGALRM, lambda _, later: _raise(number, later))
  signal.setitimer(signal.ITIMER_REAL, 0.05)  # tries again soon
