"""Times the training steps of several runs, in turns."""

from collections.abc import Callable, Mapping
from typing import Any

from moh_jax.config import Config
from moh_jax.runtime import sharding
from moh_jax.speed import timing
from moh_jax.speed.timing import Timing
from moh_jax.training.program import make_program
from moh_jax.training.task import task_builder


def step_seconds(runs: Mapping[str, Config], rounds: int) -> dict[str, Timing]:
  """Times a training step of each run on its first batch.

  Args:
    runs: by name; their states are in memory at the same time.
    rounds: measured turns.

  Returns:
    Times by name, of which the ratio to the first is that in the same turns:
    the first one's median times the median ratio to it, and the ratio's spread.
  """
  calls = {name: _step(run) for name, run in runs.items()}
  times = timing.interleaved(calls, rounds)
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
