"""Checkpoint files: Orbax step folders DIR/checkpoints/STEP.

A step folder has the items `params`, `train` (step, optimizer state, rng),
`ema` (averaged parameters, if the run keeps them), `data` (position of the
training stream) and `config` (config, class names, SHA-256 of the tokenizer).
Beside them lies the manifest of their checksums, see `manifest.py`. The folder
appears when it is complete. Each item can be read without the others, onto any
mesh and any number of processes.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from moh_jax import config as config_lib
from moh_jax.config import Config, upgrade
from moh_jax.data.tokenizer_files import write_tokenizer_files
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.runtime import commit, manifest
from moh_jax.runtime.location import resolve, steps_folder
from moh_jax.runtime.processes import ask_first_process
from moh_jax.runtime.read_params import read_params, save_args
from moh_jax.runtime.steps import (
  check_whole,
  find_step,
  list_steps,
  step_folder,
)
from moh_jax.runtime.stored_config import check_stored, read_stored

ITEMS = ("params", "train", "ema", "data", "config")


@dataclasses.dataclass(frozen=True)
class Metadata:
  """Metadata of a checkpoint, its item `config`.

  Attributes:
    config: config of the run.
    class_names: names of the classifier's outputs, () for other models.
    tokenizer_sha256: SHA-256 of the tokenizer's file, "" without one.
    encoder_sha256: of the autoencoder whose latents the model was trained on,
      see `models.weights_hash`; "" without one, and for older latents.
  """

  config: Config
  class_names: tuple[str, ...] = ()
  tokenizer_sha256: str = ""
  encoder_sha256: str = ""


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
  directory: str | epath.Path, step: int | None = None, *, verify: bool = True
) -> tuple[Metadata, int]:
  """Reads the metadata of a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint; None is the newest.
    verify: compare the metadata with its checksum first.

  Returns:
    The metadata, and the step.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: it is damaged, or this version does not know a field of its
      config.
  """
  step = find_step(directory, step)
  if verify:
    check_whole(directory, step, {"config"})
  stored = read_stored(step_folder(directory, step))
  try:
    return metadata_from_json(stored), step
  except (KeyError, ValueError) as error:
    raise ValueError(f"{directory}: checkpoint {step}: {error}") from error


def restore_params(
  directory: str | epath.Path,
  step: int,
  abstract: Any,
  *,
  use_ema: bool,
  verify: bool = True,
) -> Any:
  """Reads the parameters of a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    abstract: parameter tree of ShapeDtypeStructs with shardings.
    use_ema: prefer averaged parameters where there are any.
    verify: compare them with their checksums first.

  Raises:
    ValueError: they are damaged, or others than wanted.
  """
  item = params_item(directory, step, use_ema=use_ema, verify=verify)
  with _unreadable(directory, step, item.name):
    return read_params(item, abstract)


def params_item(
  directory: str | epath.Path, step: int, *, use_ema: bool, verify: bool = True
) -> epath.Path:
  """Path of a checkpoint's parameters, or of the averaged ones if preferred.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    use_ema: prefer averaged parameters where there are any.
    verify: compare them with their checksums first. With several processes the
      first one does.

  Raises:
    ValueError: they are damaged.
  """
  folder = step_folder(directory, step)
  files = None
  with contextlib.suppress(ValueError, OSError):  # `check_whole` names these
    files = manifest.read(folder)
  has_ema = (folder / "ema").exists() or any(
    path.startswith("ema/") for path in files or ()
  )
  item = "ema" if use_ema and has_ema else "params"
  if verify:
    verify_items(directory, step, {item})
  return folder / item


def verify_items(
  directory: str | epath.Path, step: int, items: set[str] | None
) -> None:
  """Runs `check_whole` in the first process; all processes stop on damage."""

  def check() -> list[int]:
    check_whole(directory, step, items)
    return []

  ask_first_process(check, 0)


def read_items(
  directory: str | epath.Path,
  step: int,
  items: Mapping[str, ocp.args.CheckpointArgs],
) -> dict[str, Any]:
  """Reads items of a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: how Orbax is to read each item.

  Raises:
    ValueError: an item cannot be read. Checksums find damage before; this is
      for checkpoints without them.
  """
  restored = {}
  options = ocp.CheckpointManagerOptions(create=False)
  with ocp.CheckpointManager(
    steps_folder(directory), item_names=ITEMS, options=options
  ) as manager:
    for name, args in items.items():
      with _unreadable(directory, step, name):
        one = ocp.args.Composite(**{name: args})
        restored[name] = manager.restore(step, args=one)[name]
  return restored


@contextlib.contextmanager
def _unreadable(
  directory: str | epath.Path, step: int, item: str
) -> Iterator[None]:
  """Makes a ValueError that names the item of any error of Orbax."""
  try:
    yield
  except Exception as error:
    text = " ".join(str(error).split())[:200]
    raise ValueError(
      f"{directory}, checkpoint of step {step}: item {item} cannot be "
      f"read: {type(error).__name__}: {text}"
    ) from error


def check_vacant(directory: str | epath.Path) -> None:
  """Checks that a directory holds no checkpoints yet.

  Raises:
    ValueError: it does.
  """
  if steps := list_steps(directory):
    raise ValueError(
      f"{directory} already holds checkpoints {steps}; choose an empty "
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
  save: ocp.args.CheckpointArgs = ocp.args.StandardSave(
    params, save_args(params)
  )
  handlers = {}
  if handler is not None:
    save = ocp.args.PyTreeSave(params)
    handlers = {"params": handler, "config": ocp.JsonCheckpointHandler()}
  folder = steps_folder(directory)
  options = ocp.CheckpointManagerOptions(
    cleanup_tmp_directories=True,
    enable_async_checkpointing=False,
    temporary_path_class=commit.temporary_path_class(folder),
  )
  with ocp.CheckpointManager(
    folder,
    item_names=ITEMS,
    item_handlers=handlers or None,
    options=options,
  ) as manager:
    items = ocp.args.Composite(params=save, config=config_item(metadata))
    manager.save(0, args=items, force=True)


def config_item(metadata: Metadata) -> ocp.args.JsonSave:
  """The item `config`, which also says that the step has a manifest."""
  return ocp.args.JsonSave(metadata_to_json(metadata) | {manifest.FLAG: 1})


def metadata_to_json(metadata: Metadata) -> dict[str, Any]:
  """Metadata as JSON values, as the item `config` stores them."""
  config = json.loads(config_lib.to_json(metadata.config))
  return {
    "config": config,
    "class_names": list(metadata.class_names),
    "tokenizer_sha256": metadata.tokenizer_sha256,
    "encoder_sha256": metadata.encoder_sha256,
  }


def metadata_from_json(stored: dict[str, Any]) -> Metadata:
  """Inverse of `metadata_to_json`; raises KeyError or ValueError."""
  config = config_lib.from_config_dict(upgrade(check_stored(stored)["config"]))
  return Metadata(
    config,
    tuple(stored["class_names"]),
    stored.get("tokenizer_sha256", ""),
    stored.get("encoder_sha256", ""),
  )
