"""Notices that another process of the run has died or stands still.

Each process writes a growing number into a file of its own in the working
directory, which all processes share for checkpoints. One that sees the number
of another unchanged for `SILENT_SECONDS` says so and ends, as it would wait for
the other for ever.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from moh_jax.runtime.location import steps_folder, workdir
from moh_jax.runtime.witness import Witness

_FOLDER = ".processes"
LOG = "run.log"  # in the working directory: what libraries say
_BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
STATUS = 1  # exit status of a process whose peer is gone


class Peers:
  """Watches the other processes of a run from a thread; see the module."""

  def __init__(
    self, directory: str, index: int, count: int, last_whole: Callable[[], str]
  ):
    """Begins to watch.

    Args:
      directory: working directory, local or mounted; buckets are not used.
      index: number of this process.
      count: number of processes.
      last_whole: says which checkpoint the run can go on from.
    """
    self._stop = threading.Event()
    self._witness: Witness | None = None
    self._last_whole, self._index, self._count = last_whole, index, count
    root = workdir(directory)
    if count == 1 or "://" in os.fspath(root):
      return
    self._folder = pathlib.Path(os.fspath(root)) / _FOLDER
    self._folder.mkdir(exist_ok=True)
    self._witness = Witness(
      os.fspath(steps_folder(directory)), str(self._folder.parent / LOG)
    )
    threading.Thread(target=self._watch, daemon=True).start()

  def __enter__(self) -> "Peers":
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    """Stops watching; the others see whether this process has finished.

    After an error it stays silent, so that they stop as well.
    """
    self._stop.set()
    if self._witness is None:
      return
    self._witness.dismiss()
    if kind is not None:
      return
    with contextlib.suppress(OSError):
      self._write(self._index, "finished")
      if all(self._read(i) == "finished" for i in range(self._count)):
        shutil.rmtree(self._folder)

  def _watch(self) -> None:
    seen = {i: self._read(i) for i in range(self._count) if i != self._index}
    changed = dict.fromkeys(seen, time.monotonic())
    # A name that no process before had: old files must not look alive.
    own, beat = f"{os.getpid()}.{time.time_ns()}", 0
    while not self._stop.wait(_BEAT_SECONDS):
      began = time.monotonic()
      beat += 1
      with contextlib.suppress(OSError):
        self._write(self._index, f"{own} {beat}")
      for peer, before in seen.items():
        now = self._read(peer)
        if now != before or now == "finished":
          seen[peer], changed[peer] = now, time.monotonic()
        elif began - changed[peer] > SILENT_SECONDS:
          self._leave(peer)

  def _leave(self, peer: int) -> None:
    self._witness.dismiss()
    print(
      f"error: process {peer} of the {self._count} processes of the run has "
      f"given no sign for {SILENT_SECONDS:.0f} s: it ended or stands still; "
      f"{self._last_whole()}; start all processes again to resume",
      file=sys.stderr,
      flush=True,
    )
    os._exit(STATUS)  # the main thread waits for the other process

  def _write(self, index: int, text: str) -> None:
    (self._folder / str(index)).write_text(text)

  def _read(self, index: int) -> str | None:
    try:
      return (self._folder / str(index)).read_text()
    except (OSError, ValueError):
      return None
