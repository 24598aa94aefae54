"""Batches on the devices before the step that needs them."""

import collections
import concurrent.futures
from typing import Any

from jax.sharding import Mesh

from moh_jax.data.pipeline import TrainBatches
from moh_jax.runtime import sharding


class Feed:
  """Endless iterator over training batches that are on the devices.

  A thread takes the batches and sends them, up to `ahead` of them before they
  are asked for. Only those that were asked for count in `position`, so a run
  that is continued misses none. An error of the thread is raised by `next`.

  Attributes:
    position: number of batches taken.
  """

  def __init__(self, batches: TrainBatches, mesh: Mesh, ahead: int):
    """Begins with the first `next`.

    Args:
      batches: what this process reads of every batch.
      mesh: the devices.
      ahead: batches on the devices beside the one of the step, at least 1.
    """
    self._batches, self._mesh, self._ahead = batches, mesh, ahead
    self._ready: collections.deque = collections.deque()
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self.position = batches.position

  def __enter__(self) -> "Feed":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def __iter__(self) -> "Feed":
    return self

  def __next__(self) -> Any:
    self._fill(1)
    try:
      batch = self._ready.popleft().result()
    except BaseException:
      self.close()
      raise
    self.position += 1
    self._fill(self._ahead)
    return batch

  def seek(self, position: int) -> None:
    """Makes batch `position` the next one; 0 is the first."""
    self._forget()
    self._batches.seek(position)
    self.position = position

  def close(self) -> None:
    """Ends the thread and what makes the batches."""
    self._forget()
    self._thread.shutdown()
    self._batches.close()

  def _fill(self, count: int) -> None:
    while len(self._ready) < count:
      self._ready.append(self._thread.submit(self._send))

  def _send(self) -> Any:
    return sharding.shard_batch(next(self._batches), self._mesh)

  def _forget(self) -> None:
    """Drops what is ahead, once the thread no longer reads."""
    for batch in self._ready:
      batch.cancel()
    concurrent.futures.wait(self._ready)
    self._ready.clear()
