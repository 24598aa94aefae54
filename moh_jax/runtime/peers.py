"""The other processes of a run: asked, compared with, and watched.

All of it goes through the key-value store of JAX's coordinator, which is in
process 0, but for `ask_first_process`, which is a collective operation. The
store also works where programs would differ so much that a collective hangs.
"""

import contextlib
import inspect
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from moh_jax._version import __version__
from moh_jax.runtime.steps import in_bucket, steps_folder, workdir

LOG = "run.log"  # in the working directory: what libraries say
# How long the slowest process may take to come to `agree` after the first.
_AGREE_SECONDS = 120
_READ_SECONDS = 5  # that all have to read how they differ
_SHOWN = 5  # differences that the message names
_BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
# A process that beats, but whose step stays behind the others' for so long.
LATE_SECONDS = 30.0
STATUS = 1  # exit status of a process whose peer is gone
_FINISHED = "finished"
# Numbers in keys of the store: those of a finished call or run stay there.
_calls, _runs = itertools.count(), itertools.count()
_LOG = logging.getLogger(__name__)


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
  """Checks that all processes have the same values and versions.

  All of them must call it. With one process nothing is done.

  Args:
    values: nested dicts of JSON values, such as a config.

  Raises:
    ValueError: they differ; the message names what does, and is the same in all
      processes.
    OSError: a process has not come here in time.
  """
  count, index = jax.process_count(), jax.process_index()
  if count == 1:
    return
  client = multihost.get_jax_distributed_client()
  prefix = f"moh_jax/agree/{next(_calls)}"
  versions = {
    "version of moh_jax": __version__,
    "version of jax": jax.__version__,
    "version of Python": platform.python_version(),
  }
  ours = json.dumps(flatten_dict({**versions, **values}, sep="."))
  client.key_value_set(f"{prefix}/{index}", ours)

  def read(name: int | str, whose: int) -> str:
    try:
      key, limit = f"{prefix}/{name}", 1000 * _AGREE_SECONDS
      return client.blocking_key_value_get(key, limit)
    except jax.errors.JaxRuntimeError as error:
      raise OSError(
        f"process {whose} of {count} did not say within {_AGREE_SECONDS} s "
        f"what it runs: {' '.join(str(error).split())[:100]}"
      ) from error

  if index == 0:  # alone: of many processes each would read all others
    told = [json.loads(read(i, i)) for i in range(count)]
    client.key_value_set(f"{prefix}/verdict", _differences(told))
  if verdict := read("verdict", 0):
    # The store ends with process 0: the others must have read it before.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.wait_at_barrier(f"{prefix}/read", 1000 * _READ_SECONDS)
    raise ValueError(verdict)


def _differences(told: list[dict[str, Any]]) -> str:
  """How processes differ from the first one; empty if they do not."""
  first, found = told[0], []
  for index, values in enumerate(told):
    found += [
      f"{name}: {first.get(name)!r} in process 0, {values.get(name)!r} in "
      f"process {index}"
      for name in sorted(first.keys() | values.keys())
      if first.get(name) != values.get(name)
    ]
  if not found:
    return ""
  more = len(found) - _SHOWN
  rest = f"; and {more} more" if more > 0 else ""
  return (
    f"the {len(told)} processes of the run differ: "
    f"{'; '.join(found[:_SHOWN])}{rest}"
  )


class Peers:
  """Notices that another process of the run has died, stands still, or is late.

  Each process writes a growing number and its step into the store. One that
  sees the number of another unchanged for `SILENT_SECONDS` says so and ends, as
  it would wait for the other for ever. The store does not answer while process
  0 stands still, so one thread speaks with it and another looks at the clock.
  """

  def __init__(
    self, directory: str | os.PathLike, last_whole: Callable[[], str]
  ):
    """Begins to watch, where the run has several processes.

    Args:
      directory: working directory.
      last_whole: says which checkpoint the run can go on from.
    """
    self._stop = threading.Event()
    self._dismiss: Callable[[], None] = lambda: None
    self._last_whole, self._step = last_whole, 0
    self._index, self._count = jax.process_index(), jax.process_count()
    if self._count == 1:
      return
    self._store = multihost.get_jax_distributed_client()
    self._keys = f"moh_jax/beats/{next(_runs)}/"
    root = workdir(directory)
    log = root / LOG
    if not in_bucket(root):
      folder = os.fspath(steps_folder(directory))
      self._dismiss = _start_witness(folder, str(log))
    now = time.monotonic()
    self._answered = now
    self._seen = {i: "" for i in range(self._count) if i != self._index}
    self._changed = dict.fromkeys(self._seen, now)
    self._steps = dict.fromkeys(range(self._count), (0, now))
    for work in (self._speak, self._watch):
      threading.Thread(target=work, daemon=True).start()

  def __enter__(self) -> "Peers":
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    """Stops watching; the others see whether this process has finished.

    After an error it stays silent, so that they stop as well.
    """
    self._stop.set()
    self._dismiss()
    if kind is None and self._count > 1:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._tell(_FINISHED)

  def at(self, step: int) -> None:
    """Says which step this process takes."""
    self._step = step

  def _speak(self) -> None:
    """Tells the store of this process, and reads what others told."""
    for beat in itertools.count():
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._tell(f"{self._step} {beat}")
        told = self._store.key_value_dir_get(self._keys)
        self._hear(dict(told))
      if self._stop.wait(_BEAT_SECONDS):
        return

  def _tell(self, text: str) -> None:
    key = f"{self._keys}{self._index}"
    self._store.key_value_set(key, text, allow_overwrite=True)

  def _hear(self, told: dict[str, str]) -> None:
    now = time.monotonic()
    self._answered = now
    for i in range(self._count):
      text = told.get(f"{self._keys}{i}", "")
      if i in self._seen and (text != self._seen[i] or text == _FINISHED):
        self._seen[i], self._changed[i] = text, now
      step = text.partition(" ")[0]
      if step.isdecimal() and int(step) != self._steps[i][0]:
        self._steps[i] = int(step), now

  def _watch(self) -> None:
    named: set[tuple[int, int]] = set()
    looked = time.monotonic()
    while not self._stop.wait(_BEAT_SECONDS):
      now = time.monotonic()
      if now - looked > 2 * _BEAT_SECONDS:  # this process itself stood still
        self._answered = max(self._answered, now)
        self._changed = dict.fromkeys(self._changed, now)
      looked = now
      if now - self._answered > SILENT_SECONDS and self._index:
        self._leave(0)
      for peer, changed in self._changed.items():
        if self._answered - changed > SILENT_SECONDS:
          self._leave(peer)
      for late, step, most in self._late(now):
        if (late, step) not in named:
          named.add((late, step))
          _LOG.warning(
            "process %d is late: it is at step %d for more than %.0f s, others "
            "wait for it at step %d",
            *(late, step, LATE_SECONDS, most),
          )

  def _late(self, now: float) -> list[tuple[int, int, int]]:
    """Processes behind the others, their steps, and the others' step.

    One process alone names them: the first one of those that are not late.
    """
    steps = dict(self._steps)
    most = max(step for step, _ in steps.values())
    if any(now - since < LATE_SECONDS for _, since in steps.values()):
      return []
    late = [(i, step, most) for i, (step, _) in steps.items() if step < most]
    first = min(i for i, (step, _) in steps.items() if step == most)
    return late if first == self._index else []

  def _leave(self, peer: int) -> None:
    self._dismiss()
    print(
      f"error: process {peer} of the {self._count} processes of the run has "
      f"given no sign for {SILENT_SECONDS:.0f} s: it ended or stands still; "
      f"{self._last_whole()}; start all processes again to resume",
      file=sys.stderr,
      flush=True,
    )
    os._exit(STATUS)  # the main thread waits for the other process


def _start_witness(steps_folder: str, log: str) -> Callable[[], None]:
  """Has it said in one line if this process ends without saying why.

  When the first process of a run dies, JAX's C++ code ends the others within a
  second, and no Python code of theirs runs any more. A witness is a small
  process of its own that waits for the end of the process which started it.

  Args:
    steps_folder: local folder of the run's checkpoints.
    log: file that says more.

  Returns:
    A function that ends the witness in silence: this process ends in order, or
    says why itself.
  """
  program = f"{inspect.getsource(_wait)}\n_wait({steps_folder!r}, {log!r})"
  child = subprocess.Popen(
    [sys.executable, "-I", "-c", program],
    stdin=subprocess.PIPE,
    stderr=sys.stderr,
    text=True,
    start_new_session=True,  # signals of the terminal are not for it
  )

  def dismiss() -> None:
    with contextlib.suppress(OSError, ValueError):
      child.communicate("dismissed")

  return dismiss


def _wait(steps_folder: str, log: str) -> None:
  """What a witness runs: its source, without this module's imports."""
  import os
  import sys

  if sys.stdin.read():
    return
  names = os.listdir(steps_folder) if os.path.isdir(steps_folder) else ()
  steps = [int(name) for name in names if name.isdecimal()]
  workdir = os.path.dirname(steps_folder)
  last = f"{workdir} holds no checkpoint"
  if steps:
    last = f"the last whole checkpoint in {workdir} is step {max(steps)}"
  print(
    "error: this process of the run was ended, as happens when the first one "
    f"is gone; {log} says more; {last}; start all processes again to resume",
    file=sys.stderr,
  )
