"""Saving and restoring the steps of a run."""

import orbax.checkpoint as ocp
from etils import epath

from moh_jax.config import CheckpointConfig
from moh_jax.runtime import checkpoint, location
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.state import TrainState

_RUN_FIELDS = ("step", "opt_state", "rng")


class Checkpointer:
  """Saves and restores the steps of one working directory."""

  def __init__(self, workdir: str | epath.Path, config: CheckpointConfig):
    """Opens (and creates) workdir/checkpoints.

    Args:
      workdir: local directory or bucket.
      config: what is kept; when to save is the caller's choice.
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
        cleanup_tmp_directories=True,  # halves of saves that were killed
      ),
    )

  def latest_step(self) -> int | None:
    """The newest whole checkpoint, None if there is none."""
    return self._manager.latest_step()

  def save(self, state: TrainState, position: int, metadata: Metadata) -> None:
    """Writes a step folder, in the background if so configured.

    Args:
      state: after its last step.
      position: training batches taken.
      metadata: config and class names.
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
    """Reads a step for training.

    Args:
      step: which one.
      abstract: the state as ShapeDtypeStructs whose shardings say where each
        array goes; the mesh need not be the one that saved it.

    Returns:
      The state and the position of the training stream.
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
    """Whether the cluster asked all processes to stop at this step."""
    return self._manager.reached_preemption(step)

  def wait(self) -> None:
    """Blocks until every save is on disk; raises what a save raised."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and releases the manager."""
    self._manager.close()
