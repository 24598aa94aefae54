"""Saves and restores the train state of a run."""

import orbax.checkpoint as ocp
from etils import epath

from moh_jax.config import CheckpointConfig
from moh_jax.runtime import checkpoint, location
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.state import TrainState

_RUN_FIELDS = ("step", "opt_state", "rng")


class Checkpointer:
  """Saves and restores the checkpoints of one working directory."""

  def __init__(self, workdir: str | epath.Path, config: CheckpointConfig):
    """Opens WORKDIR/checkpoints; creates it if needed.

    Args:
      workdir: local directory or bucket.
      config: section `checkpoint` of the config, of which `every` is ignored:
        the caller decides when to save.
    """
    policies = ocp.checkpoint_managers
    keep = [policies.LatestN(config.keep_last)]
    if config.keep_every:
      keep.append(policies.EveryNSteps(config.keep_every))
    self._manager = ocp.CheckpointManager(
      location.steps_folder(workdir),
      item_names=checkpoint.ITEMS,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        enable_async_checkpointing=config.async_save,
        cleanup_tmp_directories=True,  # removes what killed saves left
      ),
    )

  def latest_step(self) -> int | None:
    """Step of the newest complete checkpoint, None if there is none."""
    return self._manager.latest_step()

  def save(self, state: TrainState, position: int, metadata: Metadata) -> None:
    """Writes a checkpoint, in the background if so configured.

    Args:
      state: train state; its step names the checkpoint.
      position: number of training batches read.
      metadata: metadata of the checkpoint.
    """
    run = {name: getattr(state, name) for name in _RUN_FIELDS}
    items = {
      "params": ocp.args.StandardSave(state.params),
      "train": ocp.args.StandardSave(run),
      "data": ocp.args.JsonSave({"position": position}),
      "config": ocp.args.JsonSave(checkpoint.metadata_to_json(metadata)),
    }
    if state.ema is not None:
      items["ema"] = ocp.args.StandardSave(state.ema)
    self._manager.save(
      int(state.step), args=ocp.args.Composite(**items), force=True
    )

  def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, int]:
    """Reads a checkpoint to continue training.

    Args:
      step: step of the checkpoint.
      abstract: state as ShapeDtypeStructs with shardings; the mesh need not be
        the one that the checkpoint was saved from.

    Returns:
      The state, and the number of training batches read.
    """
    run = {name: getattr(abstract, name) for name in _RUN_FIELDS}
    items = {
      "params": ocp.args.StandardRestore(abstract.params),
      "train": ocp.args.StandardRestore(run),
      "data": ocp.args.JsonRestore(),
    }
    if abstract.ema is not None:
      items["ema"] = ocp.args.StandardRestore(abstract.ema)
    restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    state = TrainState(
      params=restored["params"], ema=restored.get("ema"), **restored["train"]
    )
    return state, restored["data"]["position"]

  def reached_preemption(self, step: int) -> bool:
    """Whether the cluster asked all processes to stop after this step."""
    return self._manager.reached_preemption(step)

  def wait(self) -> None:
    """Blocks until all saves are on disk, and raises their errors."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for all saves and frees the checkpoint manager."""
    self._manager.close()
