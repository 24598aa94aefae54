"""Throughput of a run."""

import time
from collections.abc import Callable


class Clock:
  """Throughput since the last report, evaluation left out."""

  def __init__(
    self,
    step: int,
    units_per_step: int,
    now: Callable[[], float] = time.perf_counter,
  ):
    self._units_per_step, self._now = units_per_step, now
    self.restart(step)

  def restart(self, step: int) -> None:
    """Counts from a step on, as if the last report had been there."""
    self._step, self._time = step, self._now()

  def rate(self, step: int) -> float:
    """Units per second since the last call."""
    elapsed = self._now() - self._time
    done = (step - self._step) * self._units_per_step
    self.restart(step)
    return done / elapsed if elapsed > 0 else 0.0
