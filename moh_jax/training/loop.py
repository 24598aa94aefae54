"""The run: from a config and a directory to a trained checkpoint."""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from moh_jax.config import Config, to_dict
from moh_jax.data.infer import resolve
from moh_jax.models.generation import Decode
from moh_jax.runtime import compilation_cache, sharding, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.peers import Peers, agree
from moh_jax.runtime.run_lock import RunLock
from moh_jax.training import sampled_fid, saving, wandb_log
from moh_jax.training.feed import Feed
from moh_jax.training.head_watch import HeadWatch
from moh_jax.training.metrics import MetricsWriter
from moh_jax.training.profiling import Profiler
from moh_jax.training.program import (
  check_memory,
  check_split,
  describe,
  make_program,
)
from moh_jax.training.rewind import BadStepError, Watch
from moh_jax.training.run_clock import RunClock
from moh_jax.training.same_run import check_same_run
from moh_jax.training.showing import Showing
from moh_jax.training.state import TrainState, averaged_from
from moh_jax.training.step import HEAD_LOADS
from moh_jax.training.stopping import stop_request
from moh_jax.training.task import Task, task_builder
from moh_jax.training.warm_start import keep_tokenizer, warm_start
from moh_jax.training.workdir import find_resumable, prepare, take_lock

_LOG = logging.getLogger(__name__)
AtPeak = Callable[[Config], dict[str, float]]


class NonFiniteLossError(RuntimeError):
  """The loss or the gradient norm is NaN, infinite or a spike."""


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
  at_peak: AtPeak = lambda _: {},
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
    at_peak: (config) -> seconds that a step would take at the peak of one
      device, by the name of the metric that compares the run's with them; see
      `speed.model_flops.at_peak`.

  Returns:
    The final state and evaluation.

  Raises:
    ValueError: something does not fit, or the processes of the run differ;
      before any long work starts.
    OSError: the working directory cannot be written, or belongs to another
      run that is going on.
    NonFiniteLossError: the loss or the gradient norm is NaN or infinite, or
      the loss is a spike, and the run may not go back (again).
  """
  clock = RunClock()
  config = resolve(config)
  wandb_log.check(config.log)
  if config.train.compilation_cache:
    compilation_cache.keep_in(config.train.compilation_cache)
  newest = steps.list_steps(workdir)[-1:]
  agree({"config": to_dict(config), "newest checkpoint in the workdir": newest})
  mesh = sharding.make_mesh(config.mesh, devices)
  check_split(config, mesh)
  score = sampled_fid.make_score(config, mesh, decode)
  task = task_builder(config).make_task(config, decode)
  if score:
    task = task.also_scored_by(score)
  directory = prepare(workdir)
  _LOG.info(
    "devices: %d x %s, processes: %d, mesh: %s",
    mesh.size,
    mesh.devices.flat[0].device_kind,
    jax.process_count(),
    ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
  )
  with contextlib.ExitStack() as stack:
    lock = take_lock(directory)
    stack.callback(lock.release)
    stack.enter_context(sharding.use_mesh(mesh))
    run = _Run(config, directory, mesh, task, verify, clock)
    return run.run(lock, at_peak)


class _Run:
  """One call of `train`, inside its mesh."""

  def __init__(
    self,
    config: Config,
    directory: epath.Path,
    mesh: jax.sharding.Mesh,
    task: Task,
    verify: bool,
    clock: RunClock,
  ):
    self.clock, self.peaks = clock, {}
    self.config, self.mesh, self.task = config, mesh, task
    self.verify = verify
    sha256 = task.tokenizer.sha256 if task.tokenizer else ""
    metadata = Metadata(config, task.class_names, sha256, task.encoder_sha256)
    self.start = find_resumable(directory, verify)
    if self.start is not None:
      check_same_run(directory, self.start, metadata, task.identity, verify)
    program = make_program(config, task, mesh)
    check_memory(config, program, mesh)
    self.init_state, self.abstract_state = program.init, program.state
    self.train_step = program.step
    _LOG.info("model: %s", describe(config, self.abstract_state.params))
    self.batches = Feed(task.batches(mesh), mesh, config.data.device_prefetch)
    if self.start is not None:
      saving.set_aside_after(directory, self.start)
    self.saver = saving.Saver(
      directory, config.checkpoint, metadata, task.identity, verify
    )
    self.showing = Showing(config, task, mesh, self.saver, clock)
    self.directory = directory
    self.profiler = Profiler(config.log.profiled_steps, directory)
    self.watch = Watch(config.train.rewind)
    self.head_watch = HeadWatch(config)
    self.skip_to = 0  # training batches before this one are not used again
    self.stop = stop_request()
    self.read_source: Callable[[Any], Any] | None = None
    is_new = self.start is None
    if config.train.init_from and is_new:
      params = self.abstract_state.params
      self.read_source = warm_start(metadata, params, mesh)
    if task.tokenizer:
      keep_tokenizer(directory, metadata, task.tokenizer, is_new)

  def run(self, lock: RunLock, at_peak: AtPeak) -> Result:
    """Restores or initializes, then takes the remaining steps."""
    try:
      with contextlib.ExitStack() as stack:
        stack.enter_context(self.saver)
        stack.callback(self.batches.close)
        last = functools.partial(self.saver.last_whole, verify=False)  # quick
        peers = stack.enter_context(Peers(os.fspath(self.directory), last))
        stack.enter_context(self.stop)
        stack.callback(self.profiler.stop)
        self.clock.begin(self.directory, self.start or 0)
        self.peaks = at_peak(self.config)
        while True:
          try:
            return self._run_from_start(peers, lock)
          except BadStepError as error:
            bad = error
            bad.__traceback__ = None  # it keeps the state of the run alive
          self._rewind(bad)
    except (OSError, ValueError) as error:
      kind = OSError if isinstance(error, OSError) else ValueError
      raise kind(f"{error}; {self.saver.last_whole()}") from error
    except jax.errors.JaxRuntimeError as error:
      if jax.process_count() == 1:
        raise
      raise OSError(
        "this process lost the others of the run: "
        f"{' '.join(str(error).split())[:200]}; {self.saver.last_whole()}; "
        "start all processes again to resume"
      ) from error

  def _run_from_start(self, peers: Peers, lock: RunLock) -> Result:
    self.clock.enter("restart")
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
      run=to_dict(self.config),
    )
    with contextlib.closing(writer):
      return self._loop(state, start, writer, peers, lock)

  def _rewind(self, bad: BadStepError) -> None:
    """Goes back to a checkpoint, or ends the run where it may not.

    Raises:
      NonFiniteLossError: it may not.
    """
    self.saver.wait()
    if not self.watch.may_rewind():
      raise NonFiniteLossError(f"{bad}; {self.saver.last_whole()}") from bad
    prefer = functools.partial(self.watch.target, bad.step)
    self.start = find_resumable(self.directory, self.verify, prefer)
    self.saver.rewind(-1 if self.start is None else self.start)
    self.watch.rewinds += 1
    self.skip_to = bad.position
    _LOG.warning(
      "%s: going back to step %d, and on without the batches until there "
      "(rewind %d of %d)",
      bad,
      self.start or 0,
      self.watch.rewinds,
      self.config.train.rewind.limit,
    )

  def _start(self) -> tuple[TrainState, int]:
    """The state to begin with, with the training batches at their place."""
    stored: dict[str, Any] = {}
    if self.start is None:
      state = self._initial()
    else:
      state, stored = saving.restore(
        self.directory, self.start, self.abstract_state
      )
      _LOG.info("resumed from step %d in %s", self.start, self.directory)
    self.watch.restore(stored.get("watch"), self.watch.rewinds)
    self.batches.seek(max(stored.get("position", 0), self.skip_to))
    return state, self.start or 0

  def _initial(self) -> TrainState:
    state = self.init_state()
    if not self.read_source:
      return state
    params = self.read_source(state.params)
    dtype = self.config.optim.ema_dtype if state.ema is not None else None
    return dataclasses.replace(
      state, params=params, ema=averaged_from(params, dtype)
    )

  def _loop(
    self,
    state: TrainState,
    start: int,
    writer: MetricsWriter,
    peers: Peers,
    lock: RunLock,
  ) -> Result:
    steps = self.config.train.steps
    self.clock.at(start)
    # Metrics are read one step late, those of a step with its batch's position.
    pending: tuple[int, int, Any] | None = None
    evaluation = self.showing.show_missing(start, state, writer, self.stop)
    for step in range(start + 1, steps + 1):
      peers.at(step)
      with self.clock.phase("wait_for_data"):
        batch = next(self.batches)
      with self.profiler.step(step, pending):
        if step == start + 1:
          state, metrics = self._first_step(state, batch)
          self.stop.begin()
        else:
          state, metrics = self.train_step(state, batch)
      if pending:
        self._report(*pending, writer)
      pending = (step, self.batches.position, metrics)
      self.saver.poll()
      lock.check()

      stopping = self.stop.reached()
      last = step == steps
      shows = any(self.showing.due(step)) and not stopping
      saved = last or stopping or step % self.config.checkpoint.every == 0
      if saved or shows:  # never save or score a state that is not finite
        self._report(*pending, writer)
        pending = None
      if saved:
        self._save(step, state, writer)
      if shows:
        shown = self.showing.show(step, state, writer, self.stop)
        evaluation = shown or evaluation
      if stopping or self.stop:
        if not saved:  # the stop came while the state was shown
          self._save(step, state, writer)
        self._wait_saved(step)
        _LOG.warning("stopped at step %d, saved; run again to resume", step)
        return Result(state, evaluation, finished=False)
    if not evaluation:  # a finished run that was started again
      evaluation = self.showing.evaluate(state)
      self.showing.write(writer, steps, "val", evaluation)
    self._wait_saved(steps)
    return Result(state, evaluation, finished=True)

  def _save(self, step: int, state: TrainState, writer: MetricsWriter) -> None:
    with self.clock.phase("save"):
      self.saver.wait()  # the clock keeps what it counted at whole checkpoints
      with self.saver.guard("metrics.jsonl"):
        writer.flush()
      with self.saver.guard("goodput.json"):
        self.clock.save(step)
      self.saver.save(state, self.batches.position, self.watch.to_json())

  def _wait_saved(self, step: int) -> None:
    with self.clock.phase("save"):
      self.saver.wait()
      with self.saver.guard("goodput.json"):
        self.clock.save(step)

  def _first_step(self, state: TrainState, batch: Any) -> tuple:
    """Takes a step whose program has to be compiled before, and says so."""
    _LOG.info(
      "compiling the training step; a large model takes minutes, and a message "
      "of XLA about a slow compile or constant folding is no error"
    )
    began = time.perf_counter()
    with self.clock.phase("compile"):
      result = self.train_step(state, batch)  # returns before the step is done
    _LOG.info("compiled in %.1f s", time.perf_counter() - began)
    return result

  def _report(
    self,
    step: int,
    position: int,
    metrics: Any,
    writer: MetricsWriter,
  ) -> None:
    """Reads a step's metrics, checks them, and logs them if it is time."""
    metrics = jax.device_get(metrics)  # at once, not one after the other
    loads = metrics.pop(HEAD_LOADS, None)
    values = {n: float(v) for n, v in metrics.items()}
    self.watch.check(step, position, values)
    self.clock.step_done()
    writer.advance(step)
    if step % self.config.log.every == 0 or step == self.config.train.steps:
      seconds = self.clock.seconds_per_step(step)
      rate = self.task.units_per_step / seconds
      values |= {f"{self.task.unit}_per_second": rate, **self.clock.metrics()}
      scale = seconds * self.mesh.size
      values |= {name: least / scale for name, least in self.peaks.items()}
      if self.config.train.rewind.steps:
        values["rewinds"] = self.watch.rewinds
      if self.task.stream_metrics:
        examples = position * self.config.data.batch_size
        values |= self.task.stream_metrics(examples)
      if loads is not None:
        values |= self.head_watch.metrics(step, loads)
      self.showing.write(writer, step, "train", values)
    if loads is not None and self.head_watch.due(step):
      with self.saver.guard(f"the loads of heads of step {step}"):
        writer.write_loads(step, self.head_watch.by_layer(loads))
