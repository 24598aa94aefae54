"""Checkpoint files: Orbax step folders DIR/checkpoints/STEP.

A step folder has the items `params`, `train` (step, optimizer state, rng),
`ema` (averaged parameters, if the run keeps them), `data` (position of the
training stream) and `config` (config, class names, SHA-256 of the tokenizer).
It appears when it is complete. Each item can be read without the others, onto
any mesh and any number of processes.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax import config as config_lib
from moh_jax.config import Config, legacy
from moh_jax.data.text.tokenizer_files import write_tokenizer_files
from moh_jax.data.text.tokenizers import Tokenizer
from moh_jax.runtime.location import no_checkpoint, resolve, steps_folder
from moh_jax.runtime.stored_config import check_stored, read_stored

ITEMS = ("params", "train", "ema", "data", "config")


@dataclasses.dataclass(frozen=True)
class Metadata:
  """Metadata of a checkpoint, its item `config`.

  Attributes:
    config: config of the run.
    class_names: names of the classifier's outputs, () for other models.
    tokenizer_sha256: SHA-256 of the tokenizer's file, "" without one.
  """

  config: Config
  class_names: tuple[str, ...] = ()
  tokenizer_sha256: str = ""


def save_tokenizer(
  directory: str | epath.Path,
  tokenizer: Tokenizer,
  files: Mapping[str, bytes] | None = None,
) -> None:
  """Writes a tokenizer's files into the working directory of a run.

  Args:
    directory: working directory.
    tokenizer: tokenizer to write; the kind "bytes" has no file.
    files: to write beside it; None takes those of the tokenizer.
  """
  if not tokenizer.file_name or jax.process_index():
    return
  own = {tokenizer.file_name: tokenizer.content}
  beside = tokenizer.files if files is None else files
  write_tokenizer_files(resolve(directory), {**own, **beside})


def read_metadata(
  directory: str | epath.Path, step: int | None = None
) -> tuple[Metadata, int]:
  """Reads the metadata of a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint; None is the newest.

  Returns:
    The metadata, and the step.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: this version does not know a field of its config.
  """
  step = find_step(directory, step)
  stored = read_stored(steps_folder(directory) / str(step))
  try:
    return metadata_from_json(stored), step
  except (KeyError, ValueError) as error:
    raise ValueError(f"{directory}: checkpoint {step}: {error}") from error


def restore_params(
  directory: str | epath.Path, step: int, abstract: Any, *, use_ema: bool
) -> Any:
  """Reads the parameters of a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    abstract: parameter tree of ShapeDtypeStructs with shardings.
    use_ema: prefer averaged parameters where there are any.
  """
  item = params_item(directory, step, use_ema=use_ema).name
  with _reader(directory) as manager:
    items = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
    return manager.restore(step, args=items)[item]


def params_item(
  directory: str | epath.Path, step: int, *, use_ema: bool
) -> epath.Path:
  """Path of a checkpoint's parameters, or of the averaged ones if preferred."""
  folder = steps_folder(directory) / str(step)
  has_ema = (folder / "ema").exists()
  return folder / ("ema" if use_ema and has_ema else "params")


def check_vacant(directory: str | epath.Path) -> None:
  """Checks that a directory holds no checkpoints yet.

  Raises:
    ValueError: it does.
  """
  folder = steps_folder(directory)
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
    directory: directory to write to; remains of a killed call are removed.
    params: parameter tree.
    metadata: metadata of the checkpoint.
    handler: handler of `ocp.args.PyTreeSave` for trees whose leaves are not
      arrays; None for arrays.

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
    steps_folder(directory),
    item_names=ITEMS,
    item_handlers=handlers or None,
    options=options,
  ) as manager:
    config = ocp.args.JsonSave(metadata_to_json(metadata))
    items = ocp.args.Composite(params=save, config=config)
    manager.save(0, args=items, force=True)


def find_step(directory: str | epath.Path, step: int | None) -> int:
  """Checks that a checkpoint exists; returns its step.

  Args:
    directory: working directory.
    step: step of the checkpoint; None is the newest.

  Raises:
    FileNotFoundError: there is no such checkpoint; the message lists others.
  """
  folder = steps_folder(directory)
  steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
  if not steps:
    raise no_checkpoint(directory)
  if step is None:
    return max(steps)
  if step not in steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint of step {step}; it has {sorted(steps)}"
    )
  return step


def _reader(directory: str | epath.Path) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(
    steps_folder(directory),
    item_names=ITEMS,
    options=ocp.CheckpointManagerOptions(create=False),
  )


def metadata_to_json(metadata: Metadata) -> dict[str, Any]:
  """Metadata as JSON values, as the item `config` stores them."""
  config = json.loads(config_lib.to_json(metadata.config))
  return {
    "config": config,
    "class_names": list(metadata.class_names),
    "tokenizer_sha256": metadata.tokenizer_sha256,
  }


def metadata_from_json(stored: dict[str, Any]) -> Metadata:
  """Inverse of `metadata_to_json`; raises KeyError or ValueError."""
  config = config_lib.from_config_dict(
    legacy.upgrade(check_stored(stored)["config"])
  )
  return Metadata(
    config, tuple(stored["class_names"]), stored.get("tokenizer_sha256", "")
  )
