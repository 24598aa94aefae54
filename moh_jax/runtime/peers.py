"""Notices that another process of the run has died, stands still, or is late.

Each process writes a growing number and its step into the key-value store of
JAX's coordinator, which is in process 0. One that sees the number of another
unchanged for `SILENT_SECONDS` says so and ends, as it would wait for the other
for ever. The store does not answer while process 0 stands still, so one thread
speaks with it and another one looks at the clock.
"""

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint import multihost

from moh_jax.runtime.location import steps_folder, workdir
from moh_jax.runtime.witness import Witness

LOG = "run.log"  # in the working directory: what libraries say
_BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
# A process that beats, but whose step stays behind the others' for so long.
LATE_SECONDS = 30.0
STATUS = 1  # exit status of a process whose peer is gone
_FINISHED = "finished"
_runs = itertools.count()  # keys of a finished run are not used again
_LOG = logging.getLogger(__name__)


class Peers:
  """Watches the other processes of a run from threads; see the module."""

  def __init__(self, directory: str, last_whole: Callable[[], str]):
    """Begins to watch, where the run has several processes.

    Args:
      directory: working directory.
      last_whole: says which checkpoint the run can go on from.
    """
    self._stop = threading.Event()
    self._witness: Witness | None = None
    self._last_whole, self._step = last_whole, 0
    self._index, self._count = jax.process_index(), jax.process_count()
    if self._count == 1:
      return
    self._store = multihost.get_jax_distributed_client()
    self._keys = f"moh_jax/beats/{next(_runs)}/"
    root = workdir(directory)
    log = root / LOG
    if "://" not in os.fspath(root):
      self._witness = Witness(os.fspath(steps_folder(directory)), str(log))
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
    if self._witness is not None:
      self._witness.dismiss()
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
    if self._witness is not None:
      self._witness.dismiss()
    print(
      f"error: process {peer} of the {self._count} processes of the run has "
      f"given no sign for {SILENT_SECONDS:.0f} s: it ended or stands still; "
      f"{self._last_whole()}; start all processes again to resume",
      file=sys.stderr,
      flush=True,
    )
    os._exit(STATUS)  # the main thread waits for the other process
