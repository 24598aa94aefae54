"""Interleaved timing: functions, or the steps of runs, in turns."""

import dataclasses
import math
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from moh_jax._version import __version__
from moh_jax.config import Config
from moh_jax.runtime import sharding
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

_MAX_REPEATS = 1000
_Name = TypeVar("_Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Timing:
  """Measured time of one function.

  Attributes:
    median: median seconds of a call.
    spread: (75th - 25th percentile) / median.
    turns: seconds of a call in each turn.
  """

  median: float
  spread: float
  turns: tuple[float, ...] = dataclasses.field(default=(), compare=False)

  def over(self, other: "Timing") -> "Timing":
    """The ratio to the time of another function in the same turns.

    A slow phase of the machine takes both, so it spreads less than either time.
    """
    return _summarize([a / b for a, b in zip(self.turns, other.turns)])


def interleaved(
  calls: Mapping[_Name, Callable[[], object]],
  rounds: int,
  min_seconds: float = 0.0,
  evaluations: Mapping[_Name, int] | None = None,
) -> dict[_Name, Timing]:
  """Times functions in turns, so that a slow phase of the machine hits all.

  A short call finds in the caches what the one before it left, so each turn of
  those begins with a call that is not measured.

  Args:
    calls: functions by name, without arguments; they return JAX arrays.
    rounds: measured turns of each function, after one call to warm up.
    min_seconds: seconds that a turn lasts at least: a shorter call is repeated
      in it, up to 1,000 times.
    evaluations: of what is timed in one call, by name; None is one.

  Returns:
    The time of one evaluation by name.
  """
  repeats = {name: _repeats(call, min_seconds) for name, call in calls.items()}
  times: dict[_Name, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      if repeats[name] > 1:
        seconds(call)
      one = seconds(call, repeats[name])
      times[name].append(one / (evaluations or {}).get(name, 1))
  return {name: _summarize(values) for name, values in times.items()}


def _repeats(call: Callable[[], object], min_seconds: float) -> int:
  """Warms up, then returns how often a turn repeats the call."""
  seconds(call)
  if not min_seconds:
    return 1
  return min(math.ceil(min_seconds / seconds(call)), _MAX_REPEATS)


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
  """Mean seconds of a call over `repeats` calls.

  An accelerator runs one after the other, so it need not wait for the host
  between them. A CPU may run several at once.
  """
  in_order = jax.default_backend() != "cpu"
  start = time.perf_counter()
  for index in range(repeats):
    out = call()
    if index == repeats - 1 or not in_order:
      jax.block_until_ready(out)
  return (time.perf_counter() - start) / repeats


def _summarize(values: list[float]) -> Timing:
  median, turns = statistics.median(values), tuple(values)
  if len(values) < 2:
    return Timing(median, 0.0, turns)
  low, _, high = statistics.quantiles(values, n=4)
  return Timing(median, (high - low) / median, turns)


def step_seconds(runs: Mapping[str, Config], rounds: int) -> dict[str, Timing]:
  """Times a training step of each run on its first batch, in turns.

  Args:
    runs: by name; their states are in memory at the same time.
    rounds: measured turns.

  Returns:
    Times by name, of which the ratio to the first is that in the same turns:
    the first one's median times the median ratio to it, and the ratio's spread.
  """
  calls = {name: _step(run) for name, run in runs.items()}
  times = interleaved(calls, rounds)
  first = next(iter(times.values()))
  ratios = {name: time.over(first) for name, time in times.items()}
  return {
    name: Timing(first.median * ratio.median, ratio.spread)
    for name, ratio in ratios.items()
  }


def _step(run: Config) -> Callable[[], Any]:
  """A call that takes a step; the program is the one that the run compiled."""
  mesh = sharding.make_mesh(run.mesh)
  task = task_builder(run).make_task(run)
  with sharding.use_mesh(mesh):
    batches = task.batches(mesh)
    batch = sharding.shard_batch(next(batches), mesh)
    batches.close()
    program = make_program(run, task, mesh)
    state = [program.init()]

  def take() -> Any:
    with sharding.use_mesh(mesh):
      state[0], metrics = program.step(state[0], batch)
    return metrics

  return take


def machine() -> dict[str, object]:
  """Device, processor, versions and commit that a measurement depends on."""
  device = jax.devices()[0]
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "cpu": _cpu_model(),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "moh_jax": __version__,
    "commit": _commit(),
  }


def _commit() -> str | None:
  """The last commit that changed the package, "+" if files differ from it.

  None for a package that is not in a git repository of its own.
  """
  done = subprocess.run(
    'c=$(git log -1 --format=%h -- .) && [ "$c" ] && echo $c && '
    "git status --porcelain -- .",
    cwd=pathlib.Path(__file__).parents[1],
    shell=True,
    capture_output=True,
    text=True,
    check=False,
  )
  commit, *changed = done.stdout.splitlines() or [None]
  return commit and commit + "+" * bool(changed)


def _cpu_model() -> str:
  try:
    with open("/proc/cpuinfo") as stream:
      names = [line for line in stream if line.startswith("model name")]
    return names[0].partition(":")[2].strip()
  except (OSError, IndexError):
    return platform.processor()
