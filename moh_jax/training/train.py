"""The run: from a config and a directory to a trained checkpoint."""

import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from orbax.checkpoint import multihost

from moh_jax.config import Config
from moh_jax.data.infer import resolve
from moh_jax.models.adapters import count, join
from moh_jax.models.generation import Decode
from moh_jax.runtime import processes
from moh_jax.runtime.alive import alive
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.processes import ask_first_process
from moh_jax.training import entrance, saving, warm_start
from moh_jax.training.metrics import Log
from moh_jax.training.saving import Saver
from moh_jax.training.step import Program, TrainState, make_program
from moh_jax.training.task import Task, task_builder

_LOG = logging.getLogger(__name__)
# How often the processes have compared notes. JAX wants a number that grows,
# also over several runs of one process.
_TICKS = itertools.count(1)


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

  From the first step on SIGTERM, and with one process SIGINT, save a checkpoint
  and return after the current step.

  Args:
    config: the run.
    workdir: local directory or bucket for checkpoints and metrics.
    devices: the mesh's devices; None takes all devices of all processes.
    decode: latents to images, for previews of latent diffusion.

  Returns:
    The final state and evaluation.

  Raises:
    ValueError: something does not fit, or the processes of the run differ;
      before anything is compiled.
    OSError: the working directory cannot be written, or belongs to another
      run that is going on.
    NonFiniteLossError: the loss or the gradient norm is NaN or infinite.
  """
  config = resolve(config)
  entrance.check_processes(config, workdir)
  config = warm_start.with_absolute_base(config)
  _keep_programs(config)
  mesh = make_mesh(config.mesh, devices)
  task = task_builder(config).make_task(config, decode)
  program = make_program(config, task, mesh)
  entrance.check_run(config, mesh, program)
  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    directory = enter(entrance.own_directory(workdir))
    start = saving.resumable_step(directory)
    metadata = task.metadata(config)
    changed = entrance.check_same_run(directory, start, metadata, task.identity)
    enter(use_mesh(mesh))
    first_state, metadata, frozen = warm_start.prepare(
      metadata, program, mesh, directory, start
    )
    warm_start.keep_tokenizer(
      directory, metadata, task.tokenizer, is_new=start is None
    )
    _say(config, mesh, program)
    enter(saving.last_step_named(directory))
    saver = enter(Saver(directory, metadata, task.identity, start))
    log = enter(Log(directory, config, task, mesh, start or 0))
    if start is None:
      with alive("initialising the parameters"):
        state = first_state()
    else:
      state = saving.restore(directory, start, program.state)
      total = config.train.steps
      if start > total:
        told = "nothing to do: %d steps are done, more than train.steps=%d"
        _LOG.warning(told, start, total)
      else:
        if changed:
          _LOG.info("from step %d on, changed: %s", start, "; ".join(changed))
        _LOG.info("resumed from step %d of %d in %s", start, total, directory)
    run = _Run(config, task, mesh, program, frozen, saver, log)
    return run.take_steps(state, start or 0)


def _keep_programs(config: Config) -> None:
  """Makes JAX keep compiled programs where the config says so.

  The folder takes the place of one that JAX has in use. Its size has no limit,
  so that processes which share it need no lock; the first of them writes.
  """
  path = config.train.compilation_cache
  if path in ("", jax.config.jax_compilation_cache_dir):
    return
  if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
    jax.config.update("jax_compilation_cache_max_size", -1)
  jax.config.update("jax_compilation_cache_dir", path)
  compilation_cache.reset_cache()  # JAX asks for the folder once


@dataclasses.dataclass(frozen=True)
class _Run:
  """A run whose checks are done, and whose files are open."""

  config: Config
  task: Task
  mesh: Mesh
  program: Program
  frozen: Any
  saver: Saver
  log: Log

  def take_steps(self, state: TrainState, step: int) -> Result:
    """Takes the steps after `step`, all of them or until a request to stop."""
    config, log, last = self.config, self.log, self.config.train.steps
    evaluation, stopping = {}, False
    # A run that was stopped had no time to show the state that it saved.
    is_shown = ask_first_process(lambda: [log.has(step, "val")], 1)[0]
    if step == last or (step and not is_shown):
      evaluation = self._show(step, state)
    with contextlib.ExitStack() as stack:
      if step < last:
        source = self.task.batches(self.mesh)
        source.seek(step)
        stack.enter_context(contextlib.closing(source))
        batches = stack.enter_context(contextlib.closing(self._ahead(source)))
        step_function = self._compiled()
        stops = stack.enter_context(_stops())
        trace = stack.enter_context(contextlib.ExitStack())
      while step < last and not stopping:
        batch = next(batches)
        step += 1
        self._profile(step, state, trace)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
          state, metrics = step_function(state, batch, self.frozen)
        log.step(step, metrics)
        stopping = stops()
        if stopping or step == last or step % config.checkpoint.every == 0:
          log.flush()  # raises where the loss is not finite
          log.copy()
          self.saver.save(state)
        if not stopping:
          evaluation = self._show(step, state) or evaluation
    if stopping:
      _LOG.warning("stopped at step %d, saved; run again to resume", step)
    return Result(state, evaluation, not stopping)

  def _show(self, step: int, state: TrainState) -> dict[str, float]:
    """Shows and scores a state where that is due; returns its evaluation."""
    config, task, log = self.config, self.task, self.log
    last, every, found = step == config.train.steps, config.eval.every, {}
    has_picture = task.preview and (last or step % task.preview_every == 0)
    is_scored = last or (every and step % every == 0)
    if not has_picture and not is_scored:
      return {}
    log.flush()
    use_ema = config.eval.use_ema and state.ema is not None
    params = join(self.frozen, state.ema if use_ema else state.params)
    with log.not_counted(), alive("evaluating"):
      if has_picture:
        log.picture(step, "samples", task.preview(params, self.mesh))
      if is_scored:
        found = task.evaluate(params, self.mesh)
    log.write(step, "val", found)
    return found

  def _compiled(self) -> Callable[..., tuple[TrainState, Any]]:
    """Compiles the training step."""
    program, began = self.program, time.monotonic()
    _LOG.info(
      "compiling the training step; a large model takes minutes, and a message "
      "of XLA about a slow compile or constant folding is no error"
    )
    with alive("compiling the training step"):
      lowered = program.step.lower(program.state, program.batch, program.frozen)
      compiled = lowered.compile()
    _LOG.info("compiled in %.1f s", time.monotonic() - began)
    return compiled

  def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
    """Batches on the devices, some of them before they are asked for."""

    def load() -> Any:
      return shard_batch(next(batches), self.mesh)

    with ThreadPoolExecutor(1) as pool:
      count = self.config.data.device_prefetch
      ahead = [pool.submit(load) for _ in range(count)]
      try:
        while True:
          ahead.append(pool.submit(load))
          yield ahead.pop(0).result()
      finally:
        pool.shutdown(cancel_futures=True)

  def _profile(
    self, step: int, before: Any, trace: contextlib.ExitStack
  ) -> None:
    """Begins or ends a trace of steps A to B - 1 in WORKDIR/profile.

    Args:
      step: about to be taken.
      before: the state, whose arrays are waited for.
      trace: what ends the trace that is under way.
    """
    first, end = self.config.log.profile or (0, 0)
    if step in (first, end):
      jax.block_until_ready(before)
      trace.close()
    if step == first:
      folder = os.fspath(self.log.directory / "profile")
      _LOG.info("profile: %s", folder)
      trace.enter_context(jax.profiler.trace(folder))


@contextlib.contextmanager
def _stops() -> Iterator[Callable[[], bool]]:
  """What tells, after each step, whether a signal asked the run to stop."""
  if jax.process_count() > 1:  # JAX tells all of them of a SIGTERM of one
    yield lambda: multihost.reached_preemption(next(_TICKS))
  else:
    with processes.deferred() as was_asked:
      yield was_asked


def _say(config: Config, mesh: Mesh, program: Program) -> None:
  """Logs what is trained, and on what."""
  axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
  _LOG.info(
    "devices: %d x %s, processes: %d, mesh: %s",
    *(mesh.size, mesh.devices.flat[0].device_kind, jax.process_count(), axes),
  )
  groups = config.model.layer_groups()
  widths = ", ".join(dict.fromkeys(str(group.width) for group in groups))
  trained, frozen = count(program.state.params), count(program.frozen)
  _LOG.info(
    f"model: {config.model.family}, {sum(g.depth for g in groups)} layers of "
    f"width {widths}, {config.model.activated_share:.1%} of the heads active, "
    f"{trained:,} parameters"
    + (f" are trained, {frozen:,} are frozen" if frozen else "")
  )
