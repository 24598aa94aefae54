"""Checkpoint files: Orbax step folders DIR/checkpoints/STEP.

A step folder has the items `params`, `train` (step, optimizer state, rng),
`ema` (averaged parameters, if the run keeps them), `data` (what identifies the
training data, and JAX's settings of random numbers) and `config` (`Metadata`).
Beside them lies the manifest of their checksums, see `steps.py`. The folder
appears when it is complete. Each item can be read without the others, onto any
mesh and any number of processes.
"""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.runtime import steps
from moh_jax.runtime.alive import alive
from moh_jax.runtime.parameters import check_finite
from moh_jax.runtime.processes import ask_first_process

ITEMS = ("params", "train", "ema", "data", "config")
TEMPORARY = ocp.path.atomicity_types.TMP_DIR_SUFFIX
# Arrays are stored in chunks of at most so many bytes, which bounds what a
# reader holds of an array beside its own part.
CHUNK_BYTES = 1 << 22
_SUMS = ("tokenizer_sha256", "encoder_sha256", "base_mark")
_GROUP_BYTES = 1 << 25  # of arrays that are read at once
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Metadata:
  """Metadata of a checkpoint, its item `config`.

  Attributes:
    config: config of the run.
    class_names: names of the classifier's outputs, () for other models.
    tokenizer_sha256: SHA-256 of the tokenizer's file, "" without one.
    encoder_sha256: of the autoencoder whose latents the model was trained on,
      see `models.vae`; "" without one, and for older latents.
    base_mark: of the checkpoint `train.init_from` that adapters were trained
      on, see `steps.mark`; "" without adapters.
  """

  config: Config
  class_names: tuple[str, ...] = ()
  tokenizer_sha256: str = ""
  encoder_sha256: str = ""
  base_mark: str = ""


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
    ValueError: it is damaged, or this version does not know a field of its
      config.
  """
  step = steps.find_step(directory, step)
  steps.check_whole(directory, step, {"config"})
  stored = steps.read_json_item(directory, step)
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
) -> Any:
  """Reads the parameters of a checkpoint, some at a time, the largest first.

  Orbax reads all arrays of a tree at once, and holds each as it is stored until
  it has the wanted dtype: restoring float32 as bfloat16 takes twice the result.
  Here the arrays that take most memory on their way are read while little of
  the result is there.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    abstract: tree of ShapeDtypeStructs with shardings. Arrays are converted to
      its dtypes while they are read; each process reads its own parts of them.
    use_ema: prefer averaged parameters where there are any.

  Raises:
    FloatingPointError: a number is NaN or infinite.
    ValueError: they are damaged, or others than wanted.
  """
  folder = params_item(directory, step, use_ema=use_ema)
  leaves = traverse_util.flatten_dict(abstract)
  with (
    _unreadable(directory, step, folder.name),
    contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler,
  ):
    stored = set(traverse_util.flatten_dict(handler.metadata(folder).tree))
    if other := ["/".join(map(str, path)) for path in stored ^ leaves.keys()]:
      listed = ", ".join(sorted(other))
      raise ValueError(f"it holds other arrays; differing: {listed}")
    for group in _groups(leaves):
      item = traverse_util.unflatten_dict(group)
      restore = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
      )
      read = jax.block_until_ready(handler.restore(folder, args=restore))
      leaves |= traverse_util.flatten_dict(read)
  # Some at a time, since XLA writes which numbers of an array are finite.
  for group in _groups(leaves):
    params = traverse_util.unflatten_dict(group)
    check_finite(params, f"the parameters of {directory}, step {step},")
  return traverse_util.unflatten_dict(leaves)


def params_item(
  directory: str | epath.Path, step: int, *, use_ema: bool
) -> epath.Path:
  """Path of a checkpoint's parameters, or of the averaged ones if preferred.

  The first process compares them with their checksums. Warns where the
  run's first parameters, which may be noise, are over a tenth of the averages.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    use_ema: prefer averaged parameters where there are any.

  Raises:
    ValueError: they are damaged.
  """
  folder = steps.step_folder(directory, step)
  item = "ema" if use_ema and (folder / "ema").exists() else "params"
  ask_first_process(lambda: steps.check_whole(directory, step, {item}))
  if item == "ema":
    optim = read_metadata(directory, step)[0].config.optim
    rest = optim.ema_decay**step
    if rest > 0.1:
      _LOG.warning(
        f"{directory}, step {step}: averaged parameters are still {rest:.0%} "
        f"those of the run's start (optim.ema_decay={optim.ema_decay:g}); "
        "--config.eval.use_ema=false takes the trained ones"
      )
  return folder / item


def read_items(
  directory: str | epath.Path, step: int, items: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads items of arrays, to continue training with them.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: for each item its tree of ShapeDtypeStructs with shardings.

  Raises:
    ValueError: an item cannot be read.
  """
  folder, found = steps.step_folder(directory, step), {}
  with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
    for item, abstract in items.items():
      with _unreadable(directory, step, item):
        how = ocp.args.StandardRestore(abstract)
        found[item] = handler.restore(folder / item, args=how)
  return found


def _groups(leaves: dict[tuple, Any]) -> Iterator[dict[tuple, Any]]:
  """Arrays to read at once, the largest first."""
  size = {p: math.prod(x.shape) * x.dtype.itemsize for p, x in leaves.items()}
  group = {}
  for path in sorted(leaves, key=lambda p: -size[p]):
    if group and sum(map(size.get, (*group, path))) > _GROUP_BYTES:
      yield group
      group = {}
    group[path] = leaves[path]
  if group:
    yield group


@contextlib.contextmanager
def _unreadable(
  directory: str | epath.Path, step: int, item: str
) -> Iterator[None]:
  """Makes a ValueError that names the item of any error of Orbax."""
  try:
    with alive(f"reading {directory}, step {step}, {item}"):
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
  if found := steps.list_steps(directory):
    raise ValueError(
      f"{directory} already holds checkpoints {found}; choose an empty "
      "directory, or --overwrite"
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
  save, handlers = save_arrays(params), {}
  if handler is not None:
    save = ocp.args.PyTreeSave(params)
    handlers = {"params": handler, "config": ocp.JsonCheckpointHandler()}
  folder = steps.steps_folder(directory)
  options = ocp.CheckpointManagerOptions(
    cleanup_tmp_directories=True,
    enable_async_checkpointing=False,
    temporary_path_class=temporary_path_class(folder),
  )
  with ocp.CheckpointManager(
    folder,
    item_names=ITEMS,
    item_handlers=handlers or None,
    options=options,
  ) as manager:
    config = ocp.args.JsonSave(metadata_to_json(metadata))
    items = ocp.args.Composite(params=save, config=config)
    manager.save(0, args=items, force=True)


def save_arrays(tree: Any) -> ocp.args.StandardSave:
  """How Orbax saves a tree so that it can be read in chunks."""
  args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
  return ocp.args.StandardSave(tree, args)


def metadata_to_json(metadata: Metadata) -> dict[str, Any]:
  """Metadata as JSON values, as the item `config` stores them."""
  config = json.loads(config_lib.to_json(metadata.config))
  names = list(metadata.class_names)
  return {**vars(metadata), "config": config, "class_names": names}


def metadata_from_json(stored: dict[str, Any]) -> Metadata:
  """Inverse of `metadata_to_json`; raises KeyError or ValueError."""
  config = config_lib.from_config_dict(stored["config"])
  sums = {name: stored[name] for name in _SUMS if name in stored}
  return Metadata(config, tuple(stored["class_names"]), **sums)


def temporary_path_class(
  folder: epath.Path,
) -> type[ocp.path.atomicity_types.TemporaryPath]:
  """The class of a manager's temporary paths, for the folder of its steps."""
  default = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)
  renames = issubclass(default, ocp.path.atomicity.AtomicRenameTemporaryPath)
  return _Renamed if renames else _Marked


class _Renamed(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A step folder that is renamed twice, and gets its manifest in between.

  Orbax changes its own metadata just before it renames a folder, so that only
  then all files have their last content.
  """

  step: epath.Path | None = None  # None: the folder of an item

  @classmethod
  def from_final(cls, final_path: epath.Path, **options: Any) -> "_Renamed":
    if not final_path.name.isdecimal():
      return super().from_final(final_path, **options)
    staged = final_path.with_name(f"{final_path.name}{TEMPORARY}")
    path = super().from_final(staged, **options)
    path.step = final_path
    return path

  def get_final(self) -> epath.Path:
    return self.step or super().get_final()

  async def finalize(self) -> None:
    await super().finalize()
    if self.step:
      staged = super().get_final()
      steps.write_manifest(staged)
      staged.rename(self.step)


class _Marked(ocp.path.atomicity.CommitFileTemporaryPath):
  """A step folder in a bucket, which cannot rename: a file marks it as whole.

  A step that is killed between that file and its manifest counts as damaged.
  """

  async def finalize(self) -> None:
    await super().finalize()
    if self.get_final().name.isdecimal():
      steps.write_manifest(self.get_final())
