"""Calls and training steps, timed in turns."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from moh_jax.config import Config
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder


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
    return summarize([a / b for a, b in zip(self.turns, other.turns)])


def interleaved(
  calls: Mapping[Any, Callable[[], object]],
  rounds: int,
  min_seconds: float = 0.0,
) -> dict[Any, Timing]:
  """Times calls in turns, so that a slow phase of the machine hits all.

  A short call finds in the caches what the one before it left, so each turn of
  those begins with a call that is not measured.

  Args:
    calls: by name; each returns its arrays.
    rounds: measured turns of each, after one call to warm up.
    min_seconds: seconds that a turn lasts at least: a shorter call is repeated
      in it, up to 1,000 times.

  Returns:
    The time of a call by name.
  """
  repeats = {}
  for name, call in calls.items():
    seconds(call)  # warms up
    count = math.ceil(min_seconds / seconds(call)) if min_seconds else 1
    repeats[name] = min(count, 1000)
  times: dict[Any, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      if repeats[name] > 1:
        seconds(call)
      times[name].append(seconds(call, repeats[name]))
  return {name: summarize(values) for name, values in times.items()}


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


def summarize(values: list[float]) -> Timing:
  """The median and the spread of the seconds of a call in each turn."""
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
  steps = {name: step_of(run) for name, run in runs.items()}
  times = interleaved(steps, rounds)
  first = next(iter(times.values()))
  ratios = {name: time.over(first) for name, time in times.items()}
  return {
    name: Timing(first.median * ratio.median, ratio.spread)
    for name, ratio in ratios.items()
  }


def step_of(run: Config) -> Callable[[], Any]:
  """A call that takes a step of a run on its first batch.

  Its program is the one that the run compiles.
  """
  mesh = make_mesh(run.mesh)
  # No preview is made, so nothing has to decode its latents.
  task = task_builder(run).make_task(run, lambda latents: latents)
  with use_mesh(mesh):
    batches = task.batches(mesh)
    batch = shard_batch(next(batches), mesh)
    batches.close()
    program = make_program(run, task, mesh)
    state, frozen = [program.init()], None
    if program.adapters:  # random too: values do not change the time
      where = jax.tree.map(lambda x: x.sharding, program.frozen)
      frozen = jax.jit(
        lambda: program.adapters.freeze(program.random()), out_shardings=where
      )()

  def take() -> Any:
    with use_mesh(mesh):
      state[0], metrics = program.step(state[0], batch, frozen)
    return metrics

  return take
