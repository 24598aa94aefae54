"""The run: from a config and a directory to a trained checkpoint."""

import contextlib
import dataclasses
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from moh_jax.config import Config, get_family
from moh_jax.data.infer import resolve
from moh_jax.models.generation import Decode
from moh_jax.runtime import checkpoint, location, sharding
from moh_jax.runtime.checkpoint import Metadata, save_tokenizer
from moh_jax.training import saving
from moh_jax.training.metrics import MetricsWriter
from moh_jax.training.program import make_program
from moh_jax.training.same_run import check_same_run
from moh_jax.training.state import TrainState
from moh_jax.training.task import Task
from moh_jax.training.warm_start import tokenizer_files, warm_start

_LOG = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
  """The loss or the gradient norm became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    state: after the last step taken.
    evaluation: metrics of the last evaluation, empty if there was none.
    finished: whether all steps are done; False after a request to stop.
  """

  state: TrainState
  evaluation: dict[str, float]
  finished: bool


def train(
  config: Config,
  workdir: str,
  *,
  devices: list[jax.Device] | None = None,
  decode: Decode | None = None,
) -> Result:
  """Trains, evaluates and checkpoints; run again, it resumes.

  SIGTERM, and with one process SIGINT, save a checkpoint and return after the
  current step, or after the evaluation that is under way.

  Args:
    config: the run.
    workdir: local directory or bucket for checkpoints and metrics.
    devices: the mesh's devices; None takes all devices of all processes.
    decode: latents to images, for previews of latent diffusion.

  Returns:
    The final state and evaluation.

  Raises:
    ValueError: something does not fit; before any long work starts.
    OSError: the working directory cannot be written.
    NonFiniteLossError: the loss or the gradient norm is NaN or infinite.
  """
  config = resolve(config)
  mesh = sharding.make_mesh(config.mesh, devices)
  sharding.check_batch(
    "data.batch_size", config.data.batch_size, mesh, config.optim.accumulation
  )
  sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
  sharding.check_heads(config.model, mesh, config.mesh.max_imbalance)
  task = get_family(config.model.family).tasks().make_task(config, decode)
  directory = prepare_workdir(workdir)
  _LOG.info(
    "devices: %d x %s, processes: %d, mesh: %s",
    mesh.size,
    mesh.devices.flat[0].device_kind,
    jax.process_count(),
    ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
  )
  with sharding.use_mesh(mesh):
    return _Run(config, directory, mesh, task).run()


def prepare_workdir(workdir: str) -> epath.Path:
  """Creates the directory and proves that it can be written.

  Raises:
    OSError: it cannot; the message names the directory and the reason.
  """
  directory = location.resolve(workdir)
  probe = directory / f".write_probe_{jax.process_index()}"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise OSError(f"workdir {directory} cannot be written: {error}") from error
  return directory


def _check_resumable(directory: epath.Path, metadata: Metadata) -> None:
  try:
    checkpoint.find_step(directory, None)
  except FileNotFoundError:
    return  # a new run, or one that was killed before its first save
  check_same_run(directory, metadata)


@contextlib.contextmanager
def _stop_request() -> Iterator[threading.Event]:
  """Turns the first SIGTERM or SIGINT into an event; a second one interrupts.

  With several processes it stays out of the way: there JAX's own handler
  agrees with the other processes on the step to stop at.
  """
  requested, previous = threading.Event(), {}

  def restore() -> None:
    while previous:
      signal.signal(*previous.popitem())

  def handle(number: int, _: Any) -> None:
    name = signal.Signals(number).name
    _LOG.warning("%s: saving after this step, then stopping", name)
    requested.set()
    restore()

  in_main_thread = threading.current_thread() is threading.main_thread()
  if in_main_thread and jax.process_count() == 1:
    for number in (signal.SIGTERM, signal.SIGINT):
      previous[number] = signal.signal(number, handle)
  try:
    yield requested
  finally:
    restore()


class _Run:
  """One call of `train`, inside its mesh."""

  def __init__(
    self,
    config: Config,
    directory: epath.Path,
    mesh: jax.sharding.Mesh,
    task: Task,
  ):
    self.config, self.mesh, self.task = config, mesh, task
    sha256 = task.tokenizer.sha256 if task.tokenizer else ""
    self.metadata = Metadata(config, task.class_names, sha256)
    _check_resumable(directory, self.metadata)
    self.init_state, self.abstract_state, self.train_step = make_program(
      config, task, mesh
    )
    _LOG.info("model: %s", _describe(config, self.abstract_state.params))
    self.batches = task.batches(mesh)
    self.manager = saving.open_manager(directory, config.checkpoint)
    self.directory = directory
    self.read_source: Callable[[Any], Any] | None = None
    is_new = self.manager.latest_step() is None
    if config.train.init_from and is_new:
      params = self.abstract_state.params
      self.read_source = warm_start(self.metadata, params, mesh)
    if task.tokenizer:
      # A run that goes on keeps the files that it began with.
      beside = tokenizer_files(self.metadata, task.tokenizer) if is_new else {}
      save_tokenizer(directory, task.tokenizer, beside)

  def run(self) -> Result:
    """Restores or initializes, then takes the remaining steps."""
    steps = self.config.train.steps
    with self.manager:
      state, start = self._start()
      writer = MetricsWriter(
        self.directory,
        self.config.log,
        start=start,
        steps=steps,
        shown=(
          *("loss", *self.task.shown, "balance_loss", "activated_share"),
          f"{self.task.unit}_per_second",
        ),
      )
      with contextlib.closing(writer), _stop_request() as stop:
        return self._loop(state, start, writer, stop)

  def _start(self) -> tuple[TrainState, int]:
    step = self.manager.latest_step()
    if step is None:
      state = self.init_state()
      if self.read_source:
        params = self.read_source(state.params)
        ema = jax.tree.map(jnp.copy, params) if state.ema is not None else None
        state = dataclasses.replace(state, params=params, ema=ema)
      return state, 0
    state, position = saving.restore(self.manager, step, self.abstract_state)
    self.batches.seek(position)
    _LOG.info("resumed from step %d in %s", step, self.directory)
    return state, step

  def _loop(
    self,
    state: TrainState,
    start: int,
    writer: MetricsWriter,
    stop: threading.Event,
  ) -> Result:
    config, steps = self.config, self.config.train.steps
    evaluation: dict[str, float] = {}
    clock = _Clock(start, self.task.units_per_step)
    pending: tuple[int, Any] | None = None  # metrics are read one step late
    for step in range(start + 1, steps + 1):
      batch = sharding.shard_batch(next(self.batches), self.mesh)
      if step == start + 1:
        state, metrics = self._first_step(state, batch)
        clock.restart(start)
      else:
        state, metrics = self.train_step(state, batch)
      if pending:
        self._report(*pending, writer, clock)
      pending = (step, metrics)

      stopping = stop.is_set()
      if jax.process_count() > 1:  # all processes must stop at the same step
        stopping = self.manager.reached_preemption(step)
      last = step == steps
      save = last or stopping or step % config.checkpoint.every == 0
      evaluate = last or (config.eval.every and step % config.eval.every == 0)
      if save or evaluate:  # never save or score a state that is not finite
        self._report(*pending, writer, clock)
        pending = None
      if save:
        saving.save(self.manager, state, self.batches.position, self.metadata)
      leaving = stopping and not last
      show = self.task.preview and (last or step % self.task.preview_every == 0)
      if show and not leaving:
        picture = self.task.preview(self._inference_params(state), self.mesh)
        writer.write_image(step, "samples", picture)
        clock.restart(step)
      if evaluate and not leaving:
        evaluation = self._evaluate(state)
        writer.write(step, "val", evaluation)
        clock.restart(step)
      if leaving:
        self.manager.wait_until_finished()
        _LOG.warning("stopped at step %d, saved; run again to resume", step)
        return Result(state, evaluation, finished=False)
    if not evaluation:  # a finished run that was started again
      evaluation = self._evaluate(state)
      writer.write(steps, "val", evaluation)
    self.manager.wait_until_finished()
    return Result(state, evaluation, finished=True)

  def _first_step(self, state: TrainState, batch: Any) -> tuple:
    """Takes a step whose program has to be compiled before, and says so."""
    _LOG.info(
      "compiling the training step; a large model takes minutes, and a message "
      "of XLA about a slow compile or constant folding is no error"
    )
    began = time.perf_counter()
    result = self.train_step(state, batch)  # returns before the step is done
    _LOG.info("compiled in %.1f s", time.perf_counter() - began)
    return result

  def _report(
    self, step: int, metrics: Any, writer: MetricsWriter, clock: "_Clock"
  ) -> None:
    """Reads a step's metrics, checks them, and logs them if it is time."""
    values = {name: float(value) for name, value in metrics.items()}
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        self.manager.wait_until_finished()
        saved = "no checkpoint was saved before"
        if (good := self.manager.latest_step()) is not None:
          saved = f"the last good checkpoint is step {good}"
        raise NonFiniteLossError(
          f"{name}={values[name]} at step {step}; {saved} in {self.directory}"
        )
    writer.advance(step)
    if step % self.config.log.every == 0 or step == self.config.train.steps:
      values[f"{self.task.unit}_per_second"] = clock.rate(step)
      if self.task.stream_metrics:
        examples = step * self.config.data.batch_size
        values |= self.task.stream_metrics(examples)
      writer.write(step, "train", values)

  def _evaluate(self, state: TrainState) -> dict[str, float]:
    return self.task.evaluate(self._inference_params(state), self.mesh)

  def _inference_params(self, state: TrainState) -> Any:
    use_ema = self.config.eval.use_ema and state.ema is not None
    return state.ema if use_ema else state.params


def _describe(config: Config, params: Any) -> str:
  """The family, the sizes and the number of parameters of a model."""
  groups = config.model.layer_groups()
  widths = dict.fromkeys(group.width for group in groups)
  return (
    f"{config.model.family}, {sum(group.depth for group in groups)} layers of "
    f"width {', '.join(map(str, widths))}, "
    f"{config.model.activated_share:.1%} of the heads active, "
    f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"
  )


class _Clock:
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
    self._step, self._time = step, self._now()

  def rate(self, step: int) -> float:
    """Units per second since the last call."""
    elapsed = self._now() - self._time
    done = (step - self._step) * self._units_per_step
    self.restart(step)
    return done / elapsed if elapsed > 0 else 0.0
