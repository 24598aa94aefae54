"""Checkpoints: one Orbax step folder holds everything a run or a user needs.

A step folder has the items `params`, `train` (step, optimizer, rng), `ema`
where the run keeps averaged parameters, `data` (the stream's position) and
`config` (the run's JSON and the class names). It becomes visible as a whole or
not at all, and each item is read without the others, onto any mesh and any
number of processes.
"""

import dataclasses
import json
import os
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax import config as config_lib
from moh_jax.config import CheckpointConfig, Config
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.training.state import TrainState

FOLDER = "checkpoints"
_ITEMS = ("params", "train", "ema", "data", "config")
_RUN_FIELDS = ("step", "opt_state", "rng")
# What the position in the training stream and the random choices depend on.
_STREAM_FIELDS = (
  ("train", "seed"),
  ("data", "source"),
  ("data", "batch_size"),
  ("data", "mix"),
  ("data", "ratios"),
  ("data", "sequence_length"),
  ("data", "separate_documents"),
)


@dataclasses.dataclass(frozen=True)
class Metadata:
  """What a checkpoint says of itself.

  Attributes:
    config: the run's resolved config.
    class_names: names of the outputs, empty where there are none.
    tokenizer_sha256: of the tokenizer's file, empty where there is none.
  """

  config: Config
  class_names: tuple[str, ...] = ()
  tokenizer_sha256: str = ""


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
      _folder(workdir),
      item_names=_ITEMS,
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
      "config": ocp.args.JsonSave(_to_json(metadata)),
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


def save_tokenizer(directory: str | epath.Path, tokenizer: Tokenizer) -> None:
  """Puts the tokenizer's file beside the checkpoints that need it.

  Args:
    directory: a working directory.
    tokenizer: one without a file (bytes) leaves nothing.
  """
  if not tokenizer.file_name or jax.process_index():
    return
  path = resolve(directory) / tokenizer.file_name
  if path.exists() and path.read_bytes() == tokenizer.content:
    return
  growing = path.with_name(f".{path.name}.tmp")
  growing.write_bytes(tokenizer.content)
  growing.replace(path)


def read_metadata(
  directory: str | epath.Path, step: int | None = None
) -> tuple[Metadata, int]:
  """Reads what a checkpoint says of itself.

  Args:
    directory: a working directory.
    step: which checkpoint; None is the newest.

  Returns:
    The metadata and its step.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: its config is not one of this version.
  """
  step = find_step(directory, step)
  with _reader(directory) as manager:
    items = ocp.args.Composite(config=ocp.args.JsonRestore())
    stored = manager.restore(step, args=items)["config"]
  try:
    return _from_json(stored), step
  except (KeyError, ValueError) as error:
    raise ValueError(f"{directory}: checkpoint {step}: {error}") from error


def restore_params(
  directory: str | epath.Path, step: int, abstract: Any, *, use_ema: bool
) -> Any:
  """Reads parameters alone.

  Args:
    directory: a working directory.
    step: which checkpoint.
    abstract: parameter tree of ShapeDtypeStructs, with shardings.
    use_ema: prefer the averaged parameters where the checkpoint has them.

  Returns:
    The parameters.
  """
  item = params_item(directory, step, use_ema=use_ema).name
  with _reader(directory) as manager:
    items = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
    return manager.restore(step, args=items)[item]


def params_item(
  directory: str | epath.Path, step: int, *, use_ema: bool
) -> epath.Path:
  """Where a checkpoint's parameters lie, the averaged ones if preferred."""
  folder = _folder(directory) / str(step)
  has_ema = (folder / "ema").exists()
  return folder / ("ema" if use_ema and has_ema else "params")


def check_vacant(directory: str | epath.Path) -> None:
  """Refuses to write over checkpoints.

  Raises:
    ValueError: the directory already holds some.
  """
  folder = _folder(directory)
  if folder.is_dir() and (steps := ocp.utils.checkpoint_steps(folder)):
    raise ValueError(
      f"{directory} already holds checkpoints {sorted(steps)}; choose an empty "
      "directory"
    )


def save_params(
  directory: str | epath.Path,
  params: Any,
  metadata: Metadata,
  handler: ocp.CheckpointHandler | None = None,
) -> None:
  """Writes parameters as the checkpoint of step 0, for inference.

  Args:
    directory: where to; what a killed call left there is removed.
    params: the tree.
    metadata: config and class names.
    handler: of a tree whose leaves are not arrays; it takes PyTreeSave.

  Raises:
    ValueError: the directory already holds checkpoints.
  """
  check_vacant(directory)
  save: ocp.args.CheckpointArgs = ocp.args.StandardSave(params)
  handlers = {}
  if handler is not None:
    save = ocp.args.PyTreeSave(params)
    handlers = {"params": handler, "config": ocp.JsonCheckpointHandler()}
  options = ocp.CheckpointManagerOptions(
    cleanup_tmp_directories=True, enable_async_checkpointing=False
  )
  with ocp.CheckpointManager(
    _folder(directory),
    item_names=_ITEMS,
    item_handlers=handlers or None,
    options=options,
  ) as manager:
    config = ocp.args.JsonSave(_to_json(metadata))
    items = ocp.args.Composite(params=save, config=config)
    manager.save(0, args=items, force=True)


def find_step(directory: str | epath.Path, step: int | None) -> int:
  """The wanted checkpoint, or the newest.

  Raises:
    FileNotFoundError: there is no such checkpoint; the others are listed.
  """
  folder = _folder(directory)
  steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
  if not steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint; expected {folder}/STEP, as train.py "
      "and `convert` write it"
    )
  if step is None:
    return max(steps)
  if step not in steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint of step {step}; it has {sorted(steps)}"
    )
  return step


def check_same_run(workdir: str | epath.Path, ours: Metadata) -> None:
  """Refuses to continue a run that this one could not follow exactly.

  Args:
    workdir: directory whose newest checkpoint would be continued.
    ours: of the run that wants to.

  Raises:
    ValueError: the parameters, the data order or the random choices would
      differ (the fields are named), or the run is already longer.
  """
  metadata, step = read_metadata(workdir)
  config, stored = ours.config, metadata.config
  if step > config.train.steps:
    raise ValueError(
      f"workdir {workdir} is at step {step}, beyond train.steps="
      f"{config.train.steps}"
    )
  fields = _differing(config.model, stored.model, "model")
  if config.diffusion and stored.diffusion:
    fields += _differing(config.diffusion, stored.diffusion, "diffusion")
  if config.tune != stored.tune:
    fields += config_lib.differing_fields(config.tune, stored.tune, "tune")
  if ours.tokenizer_sha256 != metadata.tokenizer_sha256:
    fields.append(
      f"sha256 of the tokenizer: {ours.tokenizer_sha256[:16]!r} here, "
      f"{metadata.tokenizer_sha256[:16]!r} there"
    )
  if bool(config.optim.ema_decay) != bool(stored.optim.ema_decay):
    fields.append(
      f"optim.ema_decay: {config.optim.ema_decay} here, "
      f"{stored.optim.ema_decay} there"
    )
  if bool(config.optim.clip_norm) != bool(stored.optim.clip_norm):
    fields.append(
      f"optim.clip_norm: {config.optim.clip_norm} here, "
      f"{stored.optim.clip_norm} there"
    )
  for section, name in _STREAM_FIELDS:
    here, there = (  # a section that has no such field has None twice
      getattr(getattr(run, section), name, None) for run in (config, stored)
    )
    if here != there:
      fields.append(f"{section}.{name}: {here!r} here, {there!r} there")
  if fields:
    raise ValueError(
      f"workdir {workdir} holds another run's checkpoint; "
      f"{'; '.join(fields)}. Choose another workdir or the same config"
    )


def _differing(ours: Any, theirs: Any, section: str) -> list[str]:
  """Fields that differ, but for those that a continued run may change."""
  if type(theirs) is type(ours):
    same = {name: getattr(ours, name) for name in ours.RUNTIME_FIELDS}
    theirs = dataclasses.replace(theirs, **same)
  return config_lib.differing_fields(ours, theirs, section)


def resolve(directory: str | epath.Path) -> epath.Path:
  """An absolute local path, or a bucket's address as it is."""
  path = epath.Path(directory)
  is_bucket = "://" in os.fspath(path)
  return path if is_bucket else path.expanduser().absolute()


def _reader(directory: str | epath.Path) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(
    _folder(directory),
    item_names=_ITEMS,
    options=ocp.CheckpointManagerOptions(create=False),
  )


def _folder(directory: str | epath.Path) -> epath.Path:
  """DIR/checkpoints, also where DIR is already that folder."""
  path = resolve(directory)
  return path if path.name == FOLDER else path / FOLDER


def _to_json(metadata: Metadata) -> dict[str, Any]:
  config = json.loads(config_lib.to_json(metadata.config))
  return {
    "config": config,
    "class_names": list(metadata.class_names),
    "tokenizer_sha256": metadata.tokenizer_sha256,
  }


def _from_json(stored: dict[str, Any]) -> Metadata:
  config = config_lib.from_config_dict(stored["config"])
  return Metadata(
    config, tuple(stored["class_names"]), stored.get("tokenizer_sha256", "")
  )
