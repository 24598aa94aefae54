"""Batches on the devices before the step that needs them."""

import queue
import threading
import time
from typing import Any

from jax.sharding import Mesh

from moh_jax.data.pipeline import TrainBatches
from moh_jax.runtime import sharding

_POLL_SECONDS = 0.1  # how soon a thread notices that it is to end


class Feed:
  """Endless iterator over training batches that are on the devices.

  A thread takes the batches and sends them, up to `ahead` of them before they
  are asked for. Only those that were asked for count in `position`, so a run
  that is continued misses none. An error of the thread is raised by `next`.

  Attributes:
    position: number of batches taken.
    waited: seconds that `next` has waited for the thread, in total.
  """

  def __init__(self, batches: TrainBatches, mesh: Mesh, ahead: int):
    """Begins with the first `next`.

    Args:
      batches: what this process reads of every batch.
      mesh: the devices.
      ahead: batches on the devices beside the one of the step, at least 1.
    """
    self._batches, self._mesh, self._ahead = batches, mesh, ahead
    self._thread: threading.Thread | None = None
    self.position, self.waited = batches.position, 0.0

  def __iter__(self) -> "Feed":
    return self

  def __enter__(self) -> "Feed":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def __next__(self) -> Any:
    if self._thread is None:
      self._start()
    try:
      batch, error = self._ready.get_nowait()
    except queue.Empty:
      began = time.perf_counter()
      batch, error = self._ready.get()
      self.waited += time.perf_counter() - began
    if error is not None:
      self.close()
      raise error
    self.position += 1
    return batch

  def seek(self, position: int) -> None:
    """Makes batch `position` the next one; 0 is the first."""
    self._end()
    self._batches.seek(position)
    self.position = position

  def close(self) -> None:
    """Ends the thread and what makes the batches."""
    self._end()
    self._batches.close()

  def _start(self) -> None:
    # The thread itself holds one more batch while the queue is full.
    self._ready: queue.Queue = queue.Queue(maxsize=max(1, self._ahead - 1))
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._send, args=(self._ready, self._ended), daemon=True
    )
    self._thread.start()

  def _end(self) -> None:
    if self._thread is not None:
      self._ended.set()
      self._thread.join()
      self._thread = None
      self._batches.seek(self.position)  # what was ahead is read again

  def _send(self, ready: queue.Queue, ended: threading.Event) -> None:
    while not ended.is_set():
      try:
        batch = next(self._batches)
        item = sharding.shard_batch(batch, self._mesh), None
      except BaseException as error:
        item = None, error
      while not ended.is_set():
        try:
          ready.put(item, timeout=_POLL_SECONDS)
          break
        except queue.Full:
          pass
      if item[1] is not None:
        return
