"""Checkpoints of a run: saved, restored, and gone back to after a bad step."""

import contextlib
import functools
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax.config import RewindConfig
from moh_jax.data.identity import Identity
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.devices import random_settings
from moh_jax.runtime.peers import ask_first_process
from moh_jax.training.step import TrainState

_LOG = logging.getLogger(__name__)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore's
_RUN_FIELDS = ("step", "opt_state", "rng")
_MEAN_STEPS = 50  # of the loss that a spike is compared with


class NonFiniteLossError(RuntimeError):
  """The loss or the gradient norm is NaN, infinite or a spike."""


class BadStepError(Exception):
  """A step whose result is not to be kept.

  Attributes:
    step: its number.
    position: training batches read, its own among them.
  """

  def __init__(self, step: int, position: int, reason: str):
    super().__init__(f"{reason} at step {step}")
    self.step, self.position = step, position


class Watch:
  """Finds bad steps, and counts how often a run went back.

  All it knows is in checkpoints, so a resumed run decides as one that was never
  interrupted. With several processes all see the same metrics.

  Attributes:
    config: section `train.rewind` of the config.
    rewinds: how often the run went back.
  """

  def __init__(self, config: RewindConfig):
    """Knows nothing yet."""
    self.config = config
    self._mean: float | None = None
    self.rewinds = 0

  def check(
    self, step: int, position: int, values: Mapping[str, float]
  ) -> None:
    """Looks at the metrics of the next step.

    Args:
      step: its number.
      position: training batches read until then, its own among them.
      values: its metrics, with "loss" and "grad_norm".

    Raises:
      BadStepError: they are not finite, or the loss is a spike.
    """
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise BadStepError(step, position, f"{name}={values[name]}")
    loss, spike = values["loss"], self.config.spike
    if self._mean is None:
      self._mean = loss
    if spike and loss > spike * self._mean:
      reason = f"loss={loss:.4g}, the mean before is {self._mean:.4g},"
      raise BadStepError(step, position, reason)
    self._mean += (loss - self._mean) / _MEAN_STEPS

  def may_rewind(self) -> bool:
    """Whether the run may go back once more."""
    return bool(self.config.steps) and self.rewinds < self.config.limit

  def target(self, step: int, saved: Sequence[int]) -> int:
    """The checkpoint to go back to from a bad step.

    Args:
      step: the bad step.
      saved: steps of the checkpoints, ascending.

    Returns:
      The newest that is far enough back, else the oldest; -1 without any.
    """
    far = [s for s in saved if s <= step - self.config.steps]
    return far[-1] if far else min(saved, default=-1)

  def to_json(self) -> dict[str, Any]:
    """What a checkpoint is to hold."""
    return {"rewinds": self.rewinds, "mean_loss": self._mean}

  def restore(self, stored: Mapping[str, Any] | None) -> None:
    """Continues from a checkpoint, which may know of fewer rewinds.

    Args:
      stored: what `to_json` returned; None at the beginning of the run, and in
        checkpoints of older versions.
    """
    stored = stored or {}
    self._mean = stored.get("mean_loss")
    self.rewinds = max(stored.get("rewinds", 0), self.rewinds)


class Saver:
  """Writes the checkpoints of a run, in the background if so configured.

  An error of a save is raised where it is noticed: at `poll`, which the loop
  calls in each step, at the next save or at `wait`. With `checkpoint.on_error =
  "continue"` it is a warning, and the next save tries again.
  """

  def __init__(
    self,
    workdir: str | epath.Path,
    metadata: Metadata,
    stream: Mapping[str, Identity],
    verify: bool = True,
    start: int | None = None,
  ):
    """Opens WORKDIR/checkpoints; creates it if needed.

    Args:
      workdir: local directory or bucket.
      metadata: of each checkpoint, the config of the run among it.
      stream: identity of the data by source, which each checkpoint holds.
      verify: compare a checkpoint with its checksums before it is called whole.
      start: step that the run continues; later ones are set aside.
    """
    if start is not None:  # before any process lists them
      ask_first_process(lambda: steps.set_aside_after(workdir, start))
    policies, section = ocp.checkpoint_managers, metadata.config.checkpoint
    keep = [policies.LatestN(section.keep_last)]
    if section.keep_every:
      keep.append(policies.EveryNSteps(section.keep_every))
    self._directory, self._every = workdir, section.every
    self._last = metadata.config.train.steps
    self._folder = steps.steps_folder(workdir)
    self._stops = section.on_error == "stop"
    self._metadata, self._stream = metadata, dict(stream)
    self._saving: int | None = None  # step that is being written
    self._verify, self._whole = verify, set[int]()  # steps found whole
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_names=checkpoint.ITEMS,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        enable_async_checkpointing=section.async_save,
        # Where a folder cannot be made in the background, Orbax's threads wait
        # for it for ever.
        async_options=ocp.options.AsyncOptions(
          create_directories_asynchronously=False
        ),
        cleanup_tmp_directories=True,  # removes what killed saves left
        temporary_path_class=checkpoint.temporary_path_class(self._folder),
      ),
    )

  def __enter__(self) -> "Saver":
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    """Waits for what is being written, whose error `wait` raises."""
    # After an error other processes may never come to where this one waits.
    if kind is None or jax.process_count() == 1:
      with contextlib.suppress(Exception):
        self._manager.close()

  def save(
    self,
    state: TrainState,
    position: int,
    watch: Mapping[str, Any] | None = None,
  ) -> None:
    """Begins to write a checkpoint, once the one before is whole.

    Args:
      state: train state; its step names the checkpoint.
      position: number of training batches read.
      watch: of `Watch.to_json`.

    Raises:
      OSError: it cannot be written, or the one before could not.
    """
    self.wait()
    step = int(state.step)
    items = {n: checkpoint.save_arrays(t) for n, t in _items(state).items()}
    data = {
      "position": position,
      "stream": self._stream,
      "watch": watch,
      "random": random_settings(),
    }
    items["data"] = ocp.args.JsonSave(data)
    items["config"] = checkpoint.config_item(self._metadata, step)
    with self.guard(f"the checkpoint of step {step}", step):
      ask_first_process(lambda: self._check_space(state))
      self._saving = step
      arguments = ocp.args.Composite(**items)
      self._manager.save(step, args=arguments, force=True)

  def due(self, step: int) -> bool:
    """Whether a checkpoint is due after a step."""
    return step % self._every == 0 or step == self._last

  def go_back(self, bad: BadStepError, watch: Watch) -> int | None:
    """Chooses the checkpoint to go back to, and sets those after it aside.

    Args:
      bad: the step whose result is not to be kept.
      watch: of the run; counts one rewind more.

    Returns:
      The checkpoint's step, None for the beginning of the run.

    Raises:
      NonFiniteLossError: the run may not go back (again).
    """
    self.wait()
    if not watch.may_rewind():
      raise NonFiniteLossError(f"{bad}; {self.last_whole()}") from bad
    prefer = functools.partial(watch.target, bad.step)
    start = resumable_step(self._directory, self._verify, prefer)
    after = -1 if start is None else start
    ask_first_process(lambda: steps.set_aside_after(self._directory, after))
    self._manager.reload()
    watch.rewinds += 1
    _LOG.warning(
      "%s: going back to step %d, and on without the batches until there "
      "(rewind %d of %d)",
      bad,
      start or 0,
      watch.rewinds,
      watch.config.limit,
    )
    return start

  def poll(self) -> None:
    """Raises the error of a save that has failed in the background."""
    # What other processes wait for must not depend on when each of them looks.
    if self._saving is None or jax.process_count() > 1:
      return
    if not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits until the checkpoint that is being written is whole.

    Raises:
      OSError: it could not be written.
    """
    step, self._saving = self._saving, None
    with self.guard(f"the checkpoint of step {step}", step):
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def guard(self, what: str, step: int | None = None) -> Iterator[None]:
    """Makes one line of errors of writing; a warning if the run goes on.

    Args:
      what: what is being written.
      step: of the checkpoint that it is, whose remains are removed.

    Raises:
      OSError: it cannot be written.
    """
    try:
      yield
    except Exception as error:  # libraries raise many kinds
      if step is None and not isinstance(error, OSError):
        raise
      if step is not None:
        self._saving = None
        self._clean_up(step)
      line = f"{what} cannot be written: {_reason(error)}"
      _LOG.debug("%s", line, exc_info=True)
      if self._stops:
        raise OSError(line) from error
      _LOG.warning("%s; %s", line, self.last_whole())

  def last_whole(self, verify: bool = True) -> str:
    """Says which checkpoint the run can go on from.

    Args:
      verify: read it, once, rather than take it to be as it was written.
    """
    verify = verify and self._verify and jax.process_index() == 0
    for step in reversed(steps.list_steps(self._directory)):
      if step not in self._whole and verify:
        if steps.find_damage(self._directory, step):
          continue
        self._whole.add(step)
      return f"the last whole checkpoint in {self._directory} is step {step}"
    return f"{self._directory} holds no checkpoint that is whole"

  @contextlib.contextmanager
  def errors(self) -> Iterator[None]:
    """Makes one line of what ends a run; it says where the run can go on.

    Raises:
      OSError: something cannot be read or written, or the other processes of
        the run are gone.
      ValueError: something does not fit.
    """
    try:
      yield
    except (OSError, ValueError) as error:
      kind = OSError if isinstance(error, OSError) else ValueError
      raise kind(f"{error}; {self.last_whole()}") from error
    except jax.errors.JaxRuntimeError as error:
      if jax.process_count() == 1:
        raise
      raise OSError(
        "this process lost the others of the run: "
        f"{' '.join(str(error).split())[:200]}; {self.last_whole()}; "
        "start all processes again to resume"
      ) from error

  def _check_space(self, state: TrainState) -> None:
    if steps.in_bucket(self._folder):
      return
    needed = steps.stored_bytes(self._directory)
    if needed is None:
      needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise OSError(
        f"it needs {needed / 1e6:,.1f} MB, {self._folder} has "
        f"{free / 1e6:,.1f} MB left"
      )

  def _clean_up(self, step: int) -> None:
    """Removes what a failed save left, which takes space from the next."""
    if jax.process_index() == 0:
      for path in self._folder.glob(f"{step}{checkpoint.TEMPORARY}*"):
        with contextlib.suppress(OSError):
          path.rmtree()
    with contextlib.suppress(OSError):
      self._manager.reload()


def resumable_step(
  directory: str | epath.Path,
  verify: bool,
  prefer: Callable[[Sequence[int]], int] = max,
) -> int | None:
  """The step to resume from, None for a new run; all processes agree.

  Args:
    directory: working directory.
    verify: take no damaged step.
    prefer: chooses one of the steps; see `steps.newest_whole_step`.

  Raises:
    ValueError: no checkpoint is whole.
  """

  def find() -> list[int]:
    known = steps.list_steps(directory)
    if known and verify:
      return [steps.newest_whole_step(directory, prefer=prefer)]
    # -1: a new run, or one that was killed before its first save.
    return [prefer(known) if known else -1]

  (step,) = ask_first_process(find, 1)
  return None if step < 0 else step


def restore(
  directory: str | epath.Path, step: int, abstract: TrainState
) -> tuple[TrainState, dict[str, Any]]:
  """Reads a checkpoint to continue training.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    abstract: state as ShapeDtypeStructs with shardings; the mesh need not be
      the one that the checkpoint was saved from.

  Returns:
    The state, and what `Saver.save` was given beside it: "position", and
    "watch" but in checkpoints of older versions.

  Raises:
    ValueError: an item cannot be read.
  """
  items = _items(abstract)
  restored = checkpoint.read_items(directory, step, items)
  state = TrainState(
    params=restored["params"], ema=restored.get("ema"), **restored["train"]
  )
  return state, steps.read_json_item(directory, step, "data")


def _items(state: TrainState) -> dict[str, Any]:
  """The items of a checkpoint that hold arrays."""
  run = {name: getattr(state, name) for name in _RUN_FIELDS}
  items = {"params": state.params, "train": run}
  return items if state.ema is None else items | {"ema": state.ema}


def _reason(error: BaseException) -> str:
  """The first OSError that led to an error, or its first words."""
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, OSError) and cause.strerror:
      where = f": {cause.filename}" if cause.filename else ""
      return f"{cause.strerror}{where}"
    cause = cause.__cause__ or cause.__context__
  text = " ".join(str(error).split())
  if found := _OS_ERROR.search(text):
    return os.strerror(int(found[1]))
  return text[:200] or type(error).__name__
