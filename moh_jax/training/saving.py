"""Saves and restores the train state of a run, and says what is safe."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax.config import CheckpointConfig
from moh_jax.data.identity import Identity
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.peers import ask_first_process
from moh_jax.training.state import TrainState

_LOG = logging.getLogger(__name__)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore's
_RUN_FIELDS = ("step", "opt_state", "rng")


class Saver:
  """Writes the checkpoints of a run, in the background if so configured.

  An error of a save is raised where it is noticed: at `poll`, which the loop
  calls in each step, at the next save or at `wait`. With `checkpoint.on_error =
  "continue"` it is a warning, and the next save tries again.
  """

  def __init__(
    self,
    workdir: str | epath.Path,
    config: CheckpointConfig,
    metadata: Metadata,
    stream: Mapping[str, Identity],
    verify: bool = True,
  ):
    """Opens WORKDIR/checkpoints; creates it if needed.

    Args:
      workdir: local directory or bucket.
      config: section `checkpoint` of the config, of which `every` is ignored:
        the caller decides when to save.
      metadata: metadata of each checkpoint.
      stream: identity of the data by source, which each checkpoint holds.
      verify: compare a checkpoint with its checksums before it is called whole.
    """
    policies = ocp.checkpoint_managers
    keep = [policies.LatestN(config.keep_last)]
    if config.keep_every:
      keep.append(policies.EveryNSteps(config.keep_every))
    self._directory = workdir
    self._folder = steps.steps_folder(workdir)
    self._stops = config.on_error == "stop"
    self._metadata, self._stream = metadata, dict(stream)
    self._saving: int | None = None  # step that is being written
    self._verify, self._whole = verify, set[int]()  # steps found whole
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_names=checkpoint.ITEMS,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        enable_async_checkpointing=config.async_save,
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
    # After an error other processes may never come to where this one waits.
    if kind is None or jax.process_count() == 1:
      self.close()

  def save(
    self,
    state: TrainState,
    position: int,
    watch: Mapping[str, Any] | None = None,
  ) -> None:
    """Begins to write a checkpoint.

    Args:
      state: train state; its step names the checkpoint.
      position: number of training batches read.
      watch: of `rewind.Watch.to_json`.

    Raises:
      OSError: it cannot be written, or the one before could not.
    """
    self.wait()
    step = int(state.step)
    items = {
      name: checkpoint.save_arrays(tree) for name, tree in _items(state).items()
    }
    data = {"position": position, "stream": self._stream, "watch": watch}
    items["data"] = ocp.args.JsonSave(data)
    items["config"] = checkpoint.config_item(self._metadata)
    with self.guard(f"the checkpoint of step {step}", step):
      self._check_space(state)
      self._saving = step
      arguments = ocp.args.Composite(**items)
      self._manager.save(step, args=arguments, force=True)

  def rewind(self, step: int) -> None:
    """Sets the checkpoints after a step aside, so that they are made anew."""
    self.wait()
    set_aside_after(self._directory, step)
    self._manager.reload()

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
      verify: read the checkpoint, once; without, it is taken to be as it was
        written.
    """
    verify = verify and self._verify and jax.process_index() == 0
    for step in reversed(steps.list_steps(self._directory)):
      if step not in self._whole and verify:
        if steps.find_damage(self._directory, step):
          continue
        self._whole.add(step)
      return f"the last whole checkpoint in {self._directory} is step {step}"
    return f"{self._directory} holds no checkpoint that is whole"

  def close(self) -> None:
    """Waits for what is being written, and closes the folder.

    An error of the last save is not raised here, but by `wait`.
    """
    try:
      self._manager.close()
    except Exception as error:
      _LOG.debug("closing: %s", error, exc_info=True)

  def _check_space(self, state: TrainState) -> None:
    if steps.in_bucket(self._folder) or jax.process_index():
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


def set_aside_after(directory: str | epath.Path, step: int) -> None:
  """Runs `steps.set_aside_after` before any process lists the checkpoints."""
  ask_first_process(lambda: steps.set_aside_after(directory, step))


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
  restored = checkpoint.read_items(directory, step, _items(abstract))
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
