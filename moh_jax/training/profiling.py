"""A trace of some steps of a run, for XProf or Perfetto."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

_LOG = logging.getLogger(__name__)
FOLDER = "profile"


class Profiler:
  """Traces steps A to B - 1 into WORKDIR/profile, in every process."""

  def __init__(self, steps: tuple[int, int] | None, workdir: epath.Path):
    """Traces nothing where `steps` is None."""
    self._steps, self._folder = steps, os.fspath(workdir / FOLDER)
    self._tracing = False

  @contextlib.contextmanager
  def step(self, step: int, before: Any) -> Iterator[None]:
    """A block that dispatches a step.

    Args:
      step: its number.
      before: arrays of the step before, which the trace is to hold or to leave
        out whole.
    """
    if self._steps is None:
      yield
      return
    first, end = self._steps
    if self._tracing and not first <= step < end:  # or the run went back
      self.stop(before)
    if first <= step < end and not self._tracing:
      jax.block_until_ready(before)
      jax.profiler.start_trace(self._folder)
      self._tracing = True
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield

  def stop(self, arrays: Any = None) -> None:
    """Writes the trace, once `arrays` are there; does nothing without one."""
    if self._tracing:
      jax.block_until_ready(arrays)
      self._tracing = False
      jax.profiler.stop_trace()
      _LOG.info("profile: %s", self._folder)
