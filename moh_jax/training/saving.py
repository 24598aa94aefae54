"""Saves and restores the train state of a run."""

from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from moh_jax.config import CheckpointConfig
from moh_jax.runtime import checkpoint, location
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.state import TrainState

_RUN_FIELDS = ("step", "opt_state", "rng")


def open_manager(
  workdir: str | epath.Path, config: CheckpointConfig
) -> ocp.CheckpointManager:
  """Opens WORKDIR/checkpoints; creates it if needed.

  Args:
    workdir: local directory or bucket.
    config: section `checkpoint` of the config, of which `every` is ignored: the
      caller decides when to save.
  """
  policies = ocp.checkpoint_managers
  keep = [policies.LatestN(config.keep_last)]
  if config.keep_every:
    keep.append(policies.EveryNSteps(config.keep_every))
  return ocp.CheckpointManager(
    location.steps_folder(workdir),
    item_names=checkpoint.ITEMS,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(keep),
      enable_async_checkpointing=config.async_save,
      cleanup_tmp_directories=True,  # removes what killed saves left
    ),
  )


def save(
  manager: ocp.CheckpointManager,
  state: TrainState,
  position: int,
  metadata: Metadata,
) -> None:
  """Writes a checkpoint, in the background if so configured.

  Args:
    manager: of the run's checkpoints.
    state: train state; its step names the checkpoint.
    position: number of training batches read.
    metadata: metadata of the checkpoint.
  """
  items = _items(state, ocp.args.StandardSave)
  items["data"] = ocp.args.JsonSave({"position": position})
  items["config"] = ocp.args.JsonSave(checkpoint.metadata_to_json(metadata))
  manager.save(int(state.step), args=ocp.args.Composite(**items), force=True)


def restore(
  manager: ocp.CheckpointManager, step: int, abstract: TrainState
) -> tuple[TrainState, int]:
  """Reads a checkpoint to continue training.

  Args:
    manager: of the run's checkpoints.
    step: step of the checkpoint.
    abstract: state as ShapeDtypeStructs with shardings; the mesh need not be
      the one that the checkpoint was saved from.

  Returns:
    The state, and the number of training batches read.
  """
  items = _items(abstract, ocp.args.StandardRestore)
  items["data"] = ocp.args.JsonRestore()
  restored = manager.restore(step, args=ocp.args.Composite(**items))
  state = TrainState(
    params=restored["params"], ema=restored.get("ema"), **restored["train"]
  )
  return state, restored["data"]["position"]


def _items(state: TrainState, of: Callable[[Any], Any]) -> dict[str, Any]:
  """Orbax's arguments, made by `of`, for the items that hold arrays."""
  run = {name: getattr(state, name) for name in _RUN_FIELDS}
  items = {"params": of(state.params), "train": of(run)}
  return items if state.ema is None else items | {"ema": of(state.ema)}
