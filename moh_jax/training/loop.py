"""The run: from a config and a directory to a trained checkpoint."""

import contextlib
import dataclasses
import logging
import math
import operator
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from moh_jax.config import Config, get_family
from moh_jax.data.infer import resolve
from moh_jax.models.generation import Decode
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata, save_tokenizer
from moh_jax.runtime.peers import Peers
from moh_jax.runtime.processes import ask_first_process
from moh_jax.runtime.run_lock import RunLock
from moh_jax.training import saving
from moh_jax.training.metrics import MetricsWriter
from moh_jax.training.program import make_program
from moh_jax.training.same_run import check_same_run
from moh_jax.training.state import TrainState
from moh_jax.training.stopping import StopRequest, stop_request
from moh_jax.training.task import Task
from moh_jax.training.warm_start import tokenizer_files, warm_start
from moh_jax.training.workdir import find_resumable, prepare, take_lock

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
  verify: bool = True,
) -> Result:
  """Trains, evaluates and checkpoints; run again, it resumes.

  From the first step on SIGTERM, and with one process SIGINT, save a checkpoint
  and return after the current step. An evaluation that is under way is given
  up; the resumed run does it.

  Args:
    config: the run.
    workdir: local directory or bucket for checkpoints and metrics.
    devices: the mesh's devices; None takes all devices of all processes.
    decode: latents to images, for previews of latent diffusion.
    verify: compare checkpoints with their checksums before resuming from the
      newest one that is whole.

  Returns:
    The final state and evaluation.

  Raises:
    ValueError: something does not fit; before any long work starts.
    OSError: the working directory cannot be written, or belongs to another
      run that is going on.
    NonFiniteLossError: the loss or the gradient norm is NaN or infinite.
  """
  config = resolve(config)
  mesh = sharding.make_mesh(config.mesh, devices)
  sharding.check_batch(
    "data.batch_size", config.data.batch_size, mesh, config.optim.accumulation
  )
  sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
  sharding.check_heads(config.model, mesh, config.mesh.max_imbalance)
  length = getattr(config.data, "sequence_length", None)
  sharding.check_tokens(config.model, mesh, length)
  task = get_family(config.model.family).tasks().make_task(config, decode)
  directory = prepare(workdir)
  _LOG.info(
    "devices: %d x %s, processes: %d, mesh: %s",
    mesh.size,
    mesh.devices.flat[0].device_kind,
    jax.process_count(),
    ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
  )
  with contextlib.ExitStack() as stack:
    if lock := take_lock(directory):
      stack.callback(lock.release)
    stack.enter_context(sharding.use_mesh(mesh))
    return _Run(config, directory, mesh, task, verify).run(lock)


class _Run:
  """One call of `train`, inside its mesh."""

  def __init__(
    self,
    config: Config,
    directory: epath.Path,
    mesh: jax.sharding.Mesh,
    task: Task,
    verify: bool,
  ):
    self.config, self.mesh, self.task = config, mesh, task
    sha256 = task.tokenizer.sha256 if task.tokenizer else ""
    metadata = Metadata(config, task.class_names, sha256)
    self.start = find_resumable(directory, verify)
    if self.start is not None:
      check_same_run(directory, self.start, metadata, task.identity, verify)
    self.init_state, self.abstract_state, self.train_step = make_program(
      config, task, mesh
    )
    _LOG.info("model: %s", _describe(config, self.abstract_state.params))
    self.batches = task.batches(mesh)
    if self.start is not None:
      saving.set_aside_after(directory, self.start)
    self.saver = saving.Saver(
      directory, config.checkpoint, metadata, task.identity
    )
    self.directory = directory
    self.read_source: Callable[[Any], Any] | None = None
    is_new = self.start is None
    if config.train.init_from and is_new:
      params = self.abstract_state.params
      self.read_source = warm_start(metadata, params, mesh)
    if task.tokenizer:
      # A run that goes on keeps the files that it began with.
      beside = tokenizer_files(metadata, task.tokenizer) if is_new else {}
      save_tokenizer(directory, task.tokenizer, beside)

  def run(self, lock: RunLock | None) -> Result:
    """Restores or initializes, then takes the remaining steps."""
    try:
      with contextlib.ExitStack() as stack:
        stack.enter_context(self.saver)
        peers = Peers(
          os.fspath(self.directory),
          jax.process_index(),
          jax.process_count(),
          self.saver.last_whole,
        )
        stack.enter_context(peers)
        state, start = self._start()
        writer = MetricsWriter(
          self.directory,
          self.config.log,
          start=start,
          steps=self.config.train.steps,
          shown=(
            *("loss", *self.task.shown, "balance_loss", "activated_share"),
            f"{self.task.unit}_per_second",
          ),
        )
        stack.enter_context(contextlib.closing(writer))
        return self._loop(state, start, writer, lock)
    except OSError as error:
      raise OSError(f"{error}; {self.saver.last_whole()}") from error
    except jax.errors.JaxRuntimeError as error:
      if jax.process_count() == 1:
        raise
      raise OSError(
        "this process lost the others of the run: "
        f"{' '.join(str(error).split())[:200]}; {self.saver.last_whole()}; "
        "start all processes again to resume"
      ) from error

  def _start(self) -> tuple[TrainState, int]:
    if self.start is None:
      state = self.init_state()
      if self.read_source:
        params = self.read_source(state.params)
        ema = jax.tree.map(jnp.copy, params) if state.ema is not None else None
        state = dataclasses.replace(state, params=params, ema=ema)
      return state, 0
    state, position = saving.restore(
      self.directory, self.start, self.abstract_state
    )
    self.batches.seek(position)
    _LOG.info("resumed from step %d in %s", self.start, self.directory)
    return state, self.start

  def _loop(
    self,
    state: TrainState,
    start: int,
    writer: MetricsWriter,
    lock: RunLock | None,
  ) -> Result:
    steps = self.config.train.steps
    clock = _Clock(start, self.task.units_per_step)
    pending: tuple[int, Any] | None = None  # metrics are read one step late
    with contextlib.ExitStack() as stack:
      stop = StopRequest()  # until the first step is compiled nothing is lost
      evaluation = self._show_missing(start, state, writer, stop)
      for step in range(start + 1, steps + 1):
        batch = sharding.shard_batch(next(self.batches), self.mesh)
        if step == start + 1:
          state, metrics = self._first_step(state, batch)
          stop = stack.enter_context(stop_request())
          clock.restart(start)
        else:
          state, metrics = self.train_step(state, batch)
        if pending:
          self._report(*pending, writer, clock)
        pending = (step, metrics)
        self.saver.poll()
        if lock:
          lock.check()

        stopping = bool(stop)
        if jax.process_count() > 1:  # all processes must stop at the same step
          stopping = self.saver.reached_preemption(step)
        last = step == steps
        shows = any(self._due(step)) and not stopping
        saved = last or stopping or step % self.config.checkpoint.every == 0
        if saved or shows:  # never save or score a state that is not finite
          self._report(*pending, writer, clock)
          pending = None
        if saved:
          self.saver.save(state, self.batches.position)
        if shows:
          evaluation = self._show(step, state, writer, stop) or evaluation
          clock.restart(step)
        if stopping or stop:
          if not saved:  # the stop came while the state was shown
            self.saver.save(state, self.batches.position)
          self.saver.wait()
          _LOG.warning("stopped at step %d, saved; run again to resume", step)
          return Result(state, evaluation, finished=False)
      if not evaluation:  # a finished run that was started again
        evaluation = self._evaluate(state)
        self._write(writer, steps, "val", evaluation)
      self.saver.wait()
    return Result(state, evaluation, finished=True)

  def _due(self, step: int) -> tuple[bool, bool]:
    """Whether a picture and an evaluation are due after a step."""
    last, every = step == self.config.train.steps, self.config.eval.every
    show = self.task.preview and (last or step % self.task.preview_every == 0)
    return bool(show), bool(last or (every and step % every == 0))

  def _show(
    self,
    step: int,
    state: TrainState,
    writer: MetricsWriter,
    stop: StopRequest,
    missing: tuple[bool, bool] = (True, True),
  ) -> dict[str, float]:
    """Shows and scores a state where that is due; returns its evaluation."""
    show, evaluate = map(operator.and_, self._due(step), missing)
    params = self._inference_params(state)
    if show:
      picture = stop.run(lambda: self.task.preview(params, self.mesh))
      if picture is not None:
        with self.saver.guard(f"the picture of step {step}"):
          writer.write_image(step, "samples", picture)
    evaluation = None
    if evaluate:
      evaluation = stop.run(lambda: self._evaluate(state))
      if evaluation is not None:
        self._write(writer, step, "val", evaluation)
    return evaluation or {}

  def _show_missing(
    self, step: int, state: TrainState, writer: MetricsWriter, stop: StopRequest
  ) -> dict[str, float]:
    """Shows and scores a restored state if the run ended before it did."""
    if not step or not any(self._due(step)):
      return {}

    def missing() -> list[int]:
      has_picture = writer.image_path(step, "samples").exists()
      return [not has_picture, not writer.has(step, "val")]

    picture, row = ask_first_process(missing, 2)
    return self._show(step, state, writer, stop, (bool(picture), bool(row)))

  def _write(
    self, writer: MetricsWriter, step: int, split: str, values: Any
  ) -> None:
    with self.saver.guard(f"metrics.jsonl, step {step},"):
      writer.write(step, split, values)

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
        self.saver.wait()
        raise NonFiniteLossError(
          f"{name}={values[name]} at step {step}; {self.saver.last_whole()}"
        )
    writer.advance(step)
    if step % self.config.log.every == 0 or step == self.config.train.steps:
      values[f"{self.task.unit}_per_second"] = clock.rate(step)
      if self.task.stream_metrics:
        examples = step * self.config.data.batch_size
        values |= self.task.stream_metrics(examples)
      self._write(writer, step, "train", values)

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
