"""Pictures and evaluations of a run's state, where they are due."""

import operator
from typing import Any

from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.runtime.peers import ask_first_process
from moh_jax.training.metrics import MetricsWriter
from moh_jax.training.run_clock import RunClock
from moh_jax.training.saving import Saver
from moh_jax.training.state import TrainState
from moh_jax.training.stopping import StopRequest
from moh_jax.training.task import Task

_SAMPLES = "samples"  # folder of the pictures


class Showing:
  """Shows and scores the states of a run."""

  def __init__(
    self,
    config: Config,
    task: Task,
    mesh: Mesh,
    saver: Saver,
    clock: RunClock,
  ):
    """Keeps what it needs.

    Args:
      config: the run.
      task: makes pictures and evaluates.
      mesh: the devices.
      saver: guards what is written.
      clock: counts the time.
    """
    self._config, self._task, self._mesh = config, task, mesh
    self._saver, self._clock = saver, clock

  def due(self, step: int) -> tuple[bool, bool]:
    """Whether a picture and an evaluation are due after a step."""
    last, every = step == self._config.train.steps, self._config.eval.every
    task = self._task
    show = task.preview and (last or step % task.preview_every == 0)
    return bool(show), bool(last or (every and step % every == 0))

  def show(
    self,
    step: int,
    state: TrainState,
    writer: MetricsWriter,
    stop: StopRequest,
    missing: tuple[bool, bool] = (True, True),
  ) -> dict[str, float]:
    """Shows and scores a state where that is due; returns its evaluation."""
    show, evaluate = map(operator.and_, self.due(step), missing)
    params = self._params(state)
    if show:
      with self._clock.phase("evaluate"):
        picture = stop.run(lambda: self._task.preview(params, self._mesh))
      if picture is not None:
        with self._saver.guard(f"the picture of step {step}"):
          writer.write_image(step, _SAMPLES, picture)
    evaluation = None
    if evaluate:
      evaluation = stop.run(lambda: self.evaluate(state))
      if evaluation is not None:
        self.write(writer, step, "val", evaluation)
    return evaluation or {}

  def show_missing(
    self, step: int, state: TrainState, writer: MetricsWriter, stop: StopRequest
  ) -> dict[str, float]:
    """Shows and scores a restored state if the run ended before it did.

    Pictures of later steps that are due, which a run that went back left, are
    removed.
    """
    with self._saver.guard(f"pictures after step {step}"):
      writer.drop_images(_SAMPLES, lambda s: s > step and self.due(s)[0])
    if not step or not any(self.due(step)):
      return {}

    def missing() -> list[int]:
      has_picture = writer.image_path(step, _SAMPLES).exists()
      return [not has_picture, not writer.has(step, "val")]

    picture, row = ask_first_process(missing, 2)
    return self.show(step, state, writer, stop, (bool(picture), bool(row)))

  def evaluate(self, state: TrainState) -> dict[str, float]:
    """Metrics of the held-out split."""
    with self._clock.phase("evaluate"):
      return self._task.evaluate(self._params(state), self._mesh)

  def write(
    self, writer: MetricsWriter, step: int, split: str, values: Any
  ) -> None:
    """Writes a row of metrics."""
    with self._saver.guard(f"metrics.jsonl, step {step},"):
      writer.write(step, split, values)

  def _params(self, state: TrainState) -> Any:
    use_ema = self._config.eval.use_ema and state.ema is not None
    return state.ema if use_ema else state.params
