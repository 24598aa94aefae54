"""Where the wall time of a run goes: speed, step times, goodput, a trace."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from moh_jax.runtime.alive import alive
from moh_jax.runtime.files import check_regular, read_bytes, write_whole
from moh_jax.runtime.json_files import MAX_BYTES, parse_json
from moh_jax.runtime.steps import in_bucket, list_steps

NAME = "goodput.json"
TRACE = "profile"  # folder of the trace, for XProf or Perfetto
# What the main thread is at. "step" is the rest: it waits for the devices.
PHASES = ("restart", "compile", "step", "wait_for_data", "save", "evaluate")
_TRAINING = ("step", "wait_for_data", "save")
_PERCENTILES = (50, 90, 99)
_LOG = logging.getLogger(__name__)


class RunClock:
  """Counts seconds by phase, over all starts of a run.

  Goodput is the share of "step". "restart" is the time from the start of the
  process's work to its first step. What a killed run did after its last
  checkpoint is not counted, as it is done again, nor is the time between two
  starts: the file has the counts at each checkpoint.
  """

  def __init__(self, now: Callable[[], float] = time.perf_counter):
    """Begins with the phase "restart"."""
    self._now, self._phase, self._since = now, "restart", now()
    self._seconds = dict.fromkeys(PHASES, 0.0)  # of this start
    self._before = dict.fromkeys(PHASES, 0.0)  # of the starts before
    self._runs, self._file = 1, None
    self._at: dict[str, Any] = {}  # counts by the step of their checkpoint
    self._rated = (0, 0.0)  # step of the last rate, seconds of training then
    self._stepped = 0.0
    self._steps: list[float] = []  # seconds of the steps since the last row

  def begin(self, workdir: epath.Path, step: int) -> None:
    """Reads what earlier starts counted.

    Args:
      workdir: the run's directory.
      step: optimizer steps done; 0 begins the counts anew.

    Raises:
      ValueError: the file is a pipe or the like, for which writing would wait.
    """
    self._file = workdir / NAME
    if self._file.exists() and not in_bucket(self._file):
      check_regular(self._file)
    if jax.process_index() or not step or not self._file.exists():
      return
    try:
      content = read_bytes(self._file, MAX_BYTES)
      stored = parse_json(content, where=str(self._file))
      self._at = dict(stored.get("at", {}))
      counts = self._at.get(str(step), stored)
      seconds = {p: float(counts["seconds"].get(p, 0)) for p in PHASES}
      self._runs, self._before = int(counts["runs"]) + 1, seconds
    except (ValueError, TypeError, KeyError, AttributeError) as error:
      _LOG.warning("%s: counts begin anew: %s", self._file, error)

  def at(self, step: int) -> None:
    """Begins with steps, after `step` of them."""
    self.enter("step")
    self._stepped, self._steps = self._training(), []
    self._rated = (step, self._stepped)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """A block whose time counts as a phase."""
    before = self.enter(name)
    try:
      yield
    finally:
      self.enter(before)

  def enter(self, name: str) -> str:
    """Begins a phase, and returns the one before."""
    now, before = self._now(), self._phase
    self._seconds[before] += now - self._since
    self._phase, self._since = name, now
    return before

  @contextlib.contextmanager
  def compiling(self, compiles: bool) -> Iterator[None]:
    """A block that dispatches a step; the first one compiles its program."""
    if not compiles:
      yield
      return
    _LOG.info(
      "compiling the training step; a large model takes minutes, and a message "
      "of XLA about a slow compile or constant folding is no error"
    )
    began = self._now()
    with self.phase("compile"), alive("compiling the training step"):
      yield  # returns before the step is done
    _LOG.info("compiled in %.1f s", self._now() - began)

  def step_done(self) -> None:
    """Counts a step whose results are there."""
    training = self._training()
    self._steps.append(training - self._stepped)
    self._stepped = training

  def seconds_per_step(self, step: int) -> float:
    """Mean since the last call, without evaluations; NaN without a step."""
    training = self._training()
    (before, since), self._rated = self._rated, (step, training)
    return (training - since) / (step - before) if step > before else np.nan

  def metrics(self) -> dict[str, float]:
    """Percentiles of the steps since the last call, and the goodput."""
    found = {}
    if self._steps:
      values = np.percentile(self._steps, _PERCENTILES)
      names = [f"step_seconds_p{p}" for p in _PERCENTILES]
      found = dict(zip(names, map(float, values)))
      self._steps = []
    return {**found, "goodput": _share_of_steps(self.seconds())}

  def seconds(self) -> dict[str, float]:
    """Seconds by phase, of all starts."""
    self.enter(self._phase)
    return {p: self._before[p] + self._seconds[p] for p in PHASES}

  def save(self, step: int = 0) -> None:
    """Writes the counts, which a start from a checkpoint goes on from.

    Args:
      step: of the checkpoint; 0 is none.
    """
    if jax.process_index() or self._file is None:
      return
    seconds = {p: round(s, 3) for p, s in self.seconds().items()}
    counts = {"runs": self._runs, "seconds": seconds}
    kept = map(str, list_steps(self._file.parent))
    self._at = {s: self._at[s] for s in kept if s in self._at}
    self._at[str(step)] = counts
    record = {
      **counts,
      "restarts": self._runs - 1,
      "goodput": _share_of_steps(seconds),
      "at": self._at,
    }
    write_whole(self._file, (json.dumps(record, indent=2) + "\n").encode())

  def _training(self) -> float:
    self.enter(self._phase)
    return sum(self._seconds[p] for p in _TRAINING)


def _share_of_steps(seconds: dict[str, float]) -> float:
  return seconds["step"] / max(sum(seconds.values()), 1e-9)


class Profiler(contextlib.AbstractContextManager):
  """Traces steps A to B - 1 into WORKDIR/profile, in every process."""

  def __init__(self, steps: tuple[int, int] | None, workdir: epath.Path):
    """Traces nothing where `steps` is None."""
    self._steps, self._folder = steps or (0, 0), os.fspath(workdir / TRACE)
    self._tracing = False

  def __exit__(self, *_: Any) -> None:
    self._trace(False, None)

  def step(
    self, step: int, before: Any
  ) -> contextlib.AbstractContextManager[Any]:
    """A block that dispatches a step.

    Args:
      step: its number.
      before: arrays of the step before, which the trace is to hold or to leave
        out whole.
    """
    first, end = self._steps
    self._trace(first <= step < end, before)
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def _trace(self, on: bool, before: Any) -> None:
    """Begins or ends the trace once arrays are there, where that is due."""
    if on == self._tracing:
      return
    jax.block_until_ready(before)
    self._tracing = on
    if on:
      jax.profiler.start_trace(self._folder)
    else:
      jax.profiler.stop_trace()
      _LOG.info("profile: %s", self._folder)
