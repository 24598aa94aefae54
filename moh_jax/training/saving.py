"""The checkpoints of a run: saved in the background, and resumed from."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax.data.files import Identity
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.devices import random_settings
from moh_jax.runtime.processes import ask_first_process
from moh_jax.training.step import TrainState


class NonFiniteLossError(FloatingPointError):
  """The loss or the gradient norm is NaN or infinite."""


class Saver(contextlib.AbstractContextManager):
  """Writes checkpoints in the background; its block ends when they are whole.

  An error of a save is raised by the next one, or at the end.
  """

  def __init__(
    self,
    directory: epath.Path,
    metadata: Metadata,
    stream: Mapping[str, Identity],
    start: int | None = None,
  ):
    """Opens DIR/checkpoints; creates it if needed.

    Args:
      directory: working directory.
      metadata: of each checkpoint, the config of the run among it.
      stream: identity of the data by source, which each checkpoint holds.
      start: step that the run continues; later ones are set aside.
    """
    if start is not None:  # before any process lists them
      ask_first_process(lambda: steps.set_aside_after(directory, start))
    policies, section = ocp.checkpoint_managers, metadata.config.checkpoint
    keep = [policies.LatestN(section.keep_last)]
    if section.keep_every:
      keep.append(policies.EveryNSteps(section.keep_every))
    folder = steps.steps_folder(directory)
    self._metadata, self._stream = metadata, dict(stream)
    self._manager = ocp.CheckpointManager(
      folder,
      item_names=checkpoint.ITEMS,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        # Where a folder cannot be made in the background, Orbax's threads wait
        # for it for ever.
        async_options=ocp.options.AsyncOptions(
          create_directories_asynchronously=False
        ),
        cleanup_tmp_directories=True,  # removes what killed saves left
        temporary_path_class=checkpoint.temporary_path_class(folder),
      ),
    )

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    if kind is None:
      with _named("the last checkpoint"):
        self._manager.close()
    elif jax.process_count() == 1:  # others may never come to where it waits
      with contextlib.suppress(Exception):
        self._manager.close()

  def save(self, state: TrainState) -> None:
    """Begins to write a checkpoint, once the one before is whole.

    Raises:
      OSError: it cannot be written, or the one before could not.
    """
    step = int(state.step)
    items = {n: checkpoint.save_arrays(t) for n, t in _items(state).items()}
    data = {"stream": self._stream, "random": random_settings()}
    items["data"] = ocp.args.JsonSave(data)
    metadata = checkpoint.metadata_to_json(self._metadata)
    items["config"] = ocp.args.JsonSave(metadata)
    with _named("the checkpoint before"):
      self._manager.wait_until_finished()
    with _named(f"the checkpoint of step {step}"):
      arguments = ocp.args.Composite(**items)
      self._manager.save(step, args=arguments, force=True)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
  """Makes an OSError of what libraries raise where they cannot write."""
  try:
    yield
  except Exception as error:  # they raise many kinds
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 300:  # the system's error is at its end
      text = f"{text[:100]} ... {text[-200:]}"
    raise OSError(f"{what} cannot be written: {text}") from error


_KINDS = NonFiniteLossError, ValueError


@contextlib.contextmanager
def last_step_named(directory: epath.Path) -> Iterator[None]:
  """Says in errors of its block which checkpoint a run can go on from.

  Raises:
    OSError: something cannot be read or written, or the other processes of the
      run are gone.
    NonFiniteLossError, ValueError: as in the block.
  """
  try:
    yield
  except (OSError, *_KINDS, jax.errors.JaxRuntimeError) as error:
    kind = next((k for k in _KINDS if isinstance(error, k)), OSError)
    is_jax = isinstance(error, jax.errors.JaxRuntimeError)
    if is_jax and jax.process_count() == 1:
      raise
    where = f"{directory} holds no checkpoint"
    if found := steps.list_steps(directory):
      where = f"the last whole checkpoint in {directory} is step {found[-1]}"
    text = " ".join(str(error).split())[:500]
    raise kind(f"{text}; {where}") from error


def resumable_step(directory: epath.Path) -> int | None:
  """The step to resume from, None for a new run; all processes agree.

  Raises:
    ValueError: no checkpoint is whole.
  """

  def find() -> list[int]:
    known = steps.list_steps(directory)
    # -1: a new run, or one that was killed before its first save.
    return [steps.newest_whole_step(directory) if known else -1]

  (step,) = ask_first_process(find, 1)
  return None if step < 0 else step


def restore(
  directory: epath.Path, step: int, abstract: TrainState
) -> TrainState:
  """Reads a checkpoint to continue training.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    abstract: state as ShapeDtypeStructs with shardings; the mesh need not be
      the one that the checkpoint was saved from.

  Raises:
    ValueError: an item cannot be read.
  """
  found = checkpoint.read_items(directory, step, _items(abstract))
  return TrainState(
    params=found["params"], ema=found.get("ema"), **found["train"]
  )


def _items(state: TrainState) -> dict[str, Any]:
  """The items of a checkpoint that hold arrays."""
  run = {name: getattr(state, name) for name in ("step", "opt_state", "rng")}
  items = {"params": state.params, "train": run}
  return items if state.ema is None else items | {"ema": state.ema}
