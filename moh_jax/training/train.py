"""The run: from a config and a directory to a trained checkpoint."""

import contextlib
import dataclasses
import logging
import operator
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from moh_jax.config import Config, to_dict
from moh_jax.data.infer import resolve
from moh_jax.models.adapters import count, join
from moh_jax.models.generation import Decode
from moh_jax.runtime import compilation_cache, sharding
from moh_jax.runtime.peers import Peers, ask_first_process
from moh_jax.training import entrance, flops, saving, warm_start
from moh_jax.training.clock import Profiler, RunClock
from moh_jax.training.feed import Feed
from moh_jax.training.metrics import HeadWatch, MetricsWriter
from moh_jax.training.saving import BadStepError, Saver, Watch
from moh_jax.training.step import (
  HEAD_LOADS,
  Program,
  TrainState,
  make_program,
)
from moh_jax.training.stopping import StopRequest
from moh_jax.training.task import Task, task_builder
from moh_jax.training.warm_start import keep_tokenizer

_LOG = logging.getLogger(__name__)
_SAMPLES = "samples"  # folder of the pictures


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
    decode: latents to images, for previews and FID of latent diffusion.
    verify: compare checkpoints with their checksums before resuming from the
      newest one that is whole.

  Returns:
    The final state and evaluation.

  Raises:
    ValueError: something does not fit, or the processes of the run differ;
      before anything is compiled.
    OSError: the working directory cannot be written, or belongs to another
      run that is going on.
    NonFiniteLossError: the loss or the gradient norm is NaN or infinite, or
      the loss is a spike, and the run may not go back (again).
  """
  # Prepare.
  clock, config = RunClock(), resolve(config)
  entrance.check_processes(config, workdir)
  warm_start.check_source(config, workdir)
  compilation_cache.keep_in(config.train.compilation_cache)
  # Devices.
  mesh = sharding.make_mesh(config.mesh, devices)
  # Program.
  builder = task_builder(config)
  objective = builder.make_objective(config)
  program = make_program(config, objective, mesh)
  entrance.check_run(config, mesh, program)
  # Directory.
  directory = entrance.check_writable(workdir)
  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    lock = enter(entrance.hold_lock(directory))
    start = saving.resumable_step(directory, verify)
    # Data.
    task = builder.make_task(config, decode)
    metadata = task.metadata(config)
    entrance.check_same_run(directory, start, metadata, task.identity, verify)
    enter(sharding.use_mesh(mesh))
    begin = warm_start.prepare(metadata, program, mesh, directory, start)
    metadata, frozen = begin.metadata, begin.frozen
    keep_tokenizer(directory, metadata, task.tokenizer, is_new=start is None)
    _say(config, mesh, program)
    # Loop.
    saver = Saver(directory, metadata, task.identity, verify, start)
    enter(saver.errors())
    enter(saver)
    batches = enter(Feed(task.batches(mesh), mesh, config.data.device_prefetch))
    peers = enter(Peers(directory, lambda: saver.last_whole(verify=False)))
    stop = enter(StopRequest())
    profiler = enter(Profiler(config.log.profiled_steps, directory))
    clock.begin(directory, start or 0)
    log = enter(Log(directory, config, task, mesh, saver, clock, frozen))
    watch, skipped = Watch(config.train.rewind), 0  # batches left out
    while True:
      clock.enter("restart")
      if start is None:
        state, stored = begin.state(), {}
      else:
        state, stored = saving.restore(directory, start, program.state)
        is_done = start >= config.train.steps
        end = f"; train.steps={config.train.steps} are done" if is_done else ""
        _LOG.info("resumed from step %d in %s%s", start, directory, end)
      watch.restore(stored.get("watch"))
      batches.seek(max(stored.get("position", 0), skipped))
      first = step = start or 0
      pending, evaluation = None, log.begin(step, state, stop)
      try:
        while step < config.train.steps:
          step += 1
          peers.at(step)
          with clock.phase("wait_for_data"):
            batch = next(batches)
          with profiler.step(step, pending), clock.compiling(step == first + 1):
            state, metrics = program.step(state, batch, frozen)
          stop.begin()  # from now on there is something to save
          if pending:  # one step late, while the devices take this one
            log.report(*pending, watch)
          pending = step, batches.position, metrics
          saver.poll()
          lock.check()
          stopping = stop.reached()
          saves = stopping or saver.due(step)
          shows = any(log.due(step)) and not stopping
          if saves or shows:  # never save or show a state that is not finite
            log.report(*pending, watch)
            pending = None
          if saves:
            log.save(step, state, batches.position, watch)
          if shows:
            evaluation = log.show(step, state, stop) or evaluation
          if stop:
            if not saves:  # the signal came after `stop.reached`
              if pending:
                log.report(*pending, watch)
              log.save(step, state, batches.position, watch)
            break
        if not stop and not evaluation:  # of a finished run, started again
          evaluation = log.show(step, state, stop, (False, True))
        log.finish(step)
        if stop:
          _LOG.warning("stopped at step %d, saved; run again to resume", step)
        return Result(state, evaluation, not stop)
      except BadStepError as error:
        bad = error.with_traceback(None)  # its frames keep the state alive
      state = pending = batch = metrics = None
      start, skipped = saver.go_back(bad, watch), bad.position


def _say(config: Config, mesh: Mesh, program: Program) -> None:
  """Logs what is trained, and on what."""
  _LOG.info(
    "devices: %d x %s, processes: %d, mesh: %s",
    mesh.size,
    mesh.devices.flat[0].device_kind,
    jax.process_count(),
    ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
  )
  groups = config.model.layer_groups()
  widths = dict.fromkeys(str(group.width) for group in groups)
  trained, frozen = count(program.state.params), count(program.frozen)
  _LOG.info(
    "model: %s, %d layers of width %s, %.1f%% of the heads active, %s "
    "parameters%s",
    config.model.family,
    sum(group.depth for group in groups),
    ", ".join(widths),
    100 * config.model.activated_share,
    f"{trained:,}",
    f" are trained, {frozen:,} are frozen" if frozen else "",
  )


class Log(contextlib.AbstractContextManager):
  """What a run tells of itself: metrics, pictures and evaluations."""

  def __init__(
    self,
    directory: epath.Path,
    config: Config,
    task: Task,
    mesh: Mesh,
    saver: saving.Saver,
    clock: RunClock,
    frozen: Any = None,
  ):
    """Writes nothing before `begin`.

    Args:
      directory: working directory.
      config: the run.
      task: makes pictures and evaluates.
      mesh: the devices.
      saver: of checkpoints; it guards all that is written.
      clock: counts the time.
      frozen: the parameters that are not trained; None where all are.
    """
    self._frozen = frozen
    self._directory, self._config, self._task = directory, config, task
    self._mesh, self._saver, self._clock = mesh, saver, clock
    self._peaks, self._heads = flops.at_peak(config), HeadWatch(config)
    self._writer: MetricsWriter | None = None

  def __exit__(self, *_: Any) -> None:
    if self._writer:
      self._writer.close()

  def begin(
    self, step: int, state: TrainState, stop: StopRequest
  ) -> dict[str, float]:
    """Opens the files to continue after a step; again where a run went back.

    A restored state is shown and scored if the run ended before it was. The
    pictures of later steps that are due, which a run that went back left, are
    removed.

    Returns:
      The evaluation, if there was any.
    """
    self.__exit__()
    self._writer = writer = MetricsWriter(
      self._directory,
      self._config.log,
      start=step,
      steps=self._config.train.steps,
      shown=(
        *("loss", *self._task.shown, "balance_loss", "activated_share"),
        f"{self._task.unit}_per_second",
      ),
      run=to_dict(self._config),
    )
    self._clock.at(step)
    with self._saver.guard(f"pictures after step {step}"):
      writer.drop_images(_SAMPLES, lambda s: s > step and self.due(s)[0])
    if not step or not any(self.due(step)):
      return {}

    def missing() -> list[int]:
      has_picture = writer.image_path(step, _SAMPLES).exists()
      return [not has_picture, not writer.has(step, "val")]

    picture, row = ask_first_process(missing, 2)
    return self.show(step, state, stop, (bool(picture), bool(row)))

  def save(
    self, step: int, state: TrainState, position: int, watch: Watch
  ) -> None:
    """Begins a checkpoint, with the metrics and the seconds until there.

    Args:
      step: its number.
      state: after the step.
      position: training batches read until then.
      watch: what it knows is saved too.
    """
    with self._clock.phase("save"):
      self._saver.wait()  # for the one before
      self._flush(step)
      self._saver.save(state, position, watch.to_json())

  def finish(self, step: int) -> None:
    """Waits for the last checkpoint, and writes what is left."""
    with self._clock.phase("save"):
      self._saver.wait()
      self._flush(step)

  def _flush(self, step: int) -> None:
    with self._saver.guard("metrics.jsonl"):
      self._writer.flush()
    with self._saver.guard("goodput.json"):
      self._clock.save(step)

  def report(
    self, step: int, position: int, metrics: Any, watch: Watch
  ) -> None:
    """Reads a step's metrics, checks them, and logs them if it is time.

    Args:
      step: its number.
      position: training batches read until then.
      metrics: arrays of the step.
      watch: checks them.

    Raises:
      BadStepError: they are not finite, or the loss is a spike.
    """
    config, task, writer = self._config, self._task, self._writer
    metrics = jax.device_get(metrics)  # at once, not one after the other
    loads = metrics.pop(HEAD_LOADS, None)
    values = {n: float(v) for n, v in metrics.items()}
    watch.check(step, position, values)
    self._clock.step_done()
    if step % config.log.every == 0 or step == config.train.steps:
      seconds = self._clock.seconds_per_step(step)
      rate = task.units_per_step / seconds
      values |= {f"{task.unit}_per_second": rate, **self._clock.metrics()}
      scale = seconds * self._mesh.size
      values |= {name: least / scale for name, least in self._peaks.items()}
      if config.train.rewind.steps:
        values["rewinds"] = watch.rewinds
      if task.stream_metrics:
        values |= task.stream_metrics(position * config.data.batch_size)
      if loads is not None:
        values |= self._heads.metrics(step, loads)
      self._write(step, "train", values)
    if loads is not None and self._heads.due(step):
      with self._saver.guard(f"the loads of heads of step {step}"):
        writer.write_loads(step, self._heads.by_layer(loads))

  def due(self, step: int) -> tuple[bool, bool]:
    """Whether a picture and an evaluation are due after a step."""
    task, every = self._task, self._config.eval.every
    last = step == self._config.train.steps
    show = task.preview and (last or step % task.preview_every == 0)
    return bool(show), bool(last or (every and step % every == 0))

  def show(
    self,
    step: int,
    state: TrainState,
    stop: StopRequest,
    missing: tuple[bool, bool] = (True, True),
  ) -> dict[str, float]:
    """Shows and scores a state where that is due; returns its evaluation."""
    show, evaluate = map(operator.and_, self.due(step), missing)
    if show:
      with self._clock.phase("evaluate"):
        params = self._params(state)
        picture = stop.run(lambda: self._task.preview(params, self._mesh))
      if picture is not None:
        with self._saver.guard(f"the picture of step {step}"):
          self._writer.write_image(step, _SAMPLES, picture)
    found = stop.run(lambda: self._scores(state)) if evaluate else None
    if found is not None:
      self._write(step, "val", found)
    return found or {}

  def _scores(self, state: TrainState) -> dict[str, float]:
    with self._clock.phase("evaluate"):
      return self._task.evaluate(self._params(state), self._mesh)

  def _write(self, step: int, split: str, values: dict[str, float]) -> None:
    with self._saver.guard(f"metrics.jsonl, step {step},"):
      self._writer.write(step, split, values)

  def _params(self, state: TrainState) -> Any:
    use_ema = self._config.eval.use_ema and state.ema is not None
    trained = state.ema if use_ema else state.params
    return join(self._frozen, trained)
