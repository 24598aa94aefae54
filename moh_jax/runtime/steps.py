"""The checkpoints of a directory: where they lie, and which are whole.

A run keeps the checkpoint of a step in the folder DIR/checkpoints/STEP. The
file `manifest.txt` of such a folder is written last, before the folder gets its
name. Its first line holds the checksum of the others, each of which states the
checksum, the length and the path of a file of the step. The checksum is XXH3 of
128 bits, so that reading a file takes longer than summing it up.

A config file may leave the model to a checkpoint (`load_config`).

Importable without JAX.
"""

import concurrent.futures
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import xxhash
from etils import epath

from moh_jax.config import Config, TrainConfig
from moh_jax.config.base import read_fields
from moh_jax.config.parse import (
  from_config_dict,
  merged,
  override,
  run_file,
)
from moh_jax.runtime.alive import alive
from moh_jax.runtime.files import checksum, parse_json, write_whole

FOLDER = "checkpoints"
_STEP = re.compile("0|[1-9][0-9]{0,17}")  # a folder's name, no other spelling
MANIFEST = "manifest.txt"
_LOG = logging.getLogger(__name__)
_HEADER = "moh_jax manifest 1, XXH3-128 of the following lines: "
_THREADS = 4
_COMMITTED = "commit_success.txt"  # Orbax's mark of a whole folder in a bucket
_SET_ASIDE = "damaged"


class DamagedCheckpointError(ValueError):
  """Files of a checkpoint are not as they were written."""


def absolute(directory: str | epath.Path) -> epath.Path:
  """An absolute local path, or a bucket's address as it is."""
  path = epath.Path(directory)
  return path if in_bucket(path) else path.expanduser().absolute()


def in_bucket(path: str | os.PathLike) -> bool:
  """Whether a path is an address, such as gs://BUCKET/DIR."""
  return "://" in str(path)


def workdir(directory: str | epath.Path) -> epath.Path:
  """DIR, which holds the tokenizer, also where DIR is DIR/checkpoints."""
  path = absolute(directory)
  return path.parent if path.name == FOLDER else path


def steps_folder(directory: str | epath.Path) -> epath.Path:
  """DIR/checkpoints, also where DIR is already that folder."""
  return workdir(directory) / FOLDER


def step_folder(directory: str | epath.Path, step: int) -> epath.Path:
  """The folder of one checkpoint."""
  return steps_folder(directory) / str(step)


def list_steps(directory: str | epath.Path) -> list[int]:
  """Steps of the checkpoints in a working directory, the oldest first."""
  folder = steps_folder(directory)
  if not folder.is_dir():
    return []
  marked = in_bucket(folder)
  return sorted(
    int(path.name)
    for path in folder.iterdir()
    if _STEP.fullmatch(path.name) and path.is_dir()
    if not marked or (path / _COMMITTED).exists()
  )


def find_step(directory: str | epath.Path, step: int | None) -> int:
  """Checks that a checkpoint exists; returns its step.

  Args:
    directory: working directory.
    step: step of the checkpoint; None is the newest.

  Raises:
    FileNotFoundError: there is no such checkpoint; the message lists others.
  """
  steps = list_steps(directory)
  if not steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint; expected "
      f"{steps_folder(directory)}/STEP, as `train` and `convert` write it"
    )
  if step is None:
    return max(steps)
  if step not in steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint of step {step}; it has {steps}"
    )
  return step


def read_json_item(
  directory: str | epath.Path, step: int, item: str = "config"
) -> dict[str, Any]:
  """Reads the JSON of a checkpoint's item "config" or "data".

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged; the message names the file.
  """
  file = step_folder(directory, step) / item / "metadata"
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such file; the checkpoint is damaged")
  return parse_json(file.read_bytes(), where=os.fspath(file))


@alive("comparing a checkpoint with its checksums")
def find_damage(
  directory: str | epath.Path, step: int, items: Collection[str] | None = None
) -> dict[str, str]:
  """Compares the files of a checkpoint with its checksums.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: items to read; None reads all. Files of the step itself are always
      read.

  Returns:
    For each damaged file, by its path within the step, how it differs.
  """
  folder = step_folder(directory, step)
  try:
    entries = read_manifest(folder)
  except (ValueError, OSError) as error:
    return {MANIFEST: str(error)}
  wanted = {
    name: entry
    for name, entry in entries.items()
    if items is None or "/" not in name or name.partition("/")[0] in items
  }
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(
      lambda name: _difference(folder / name, *wanted[name]), wanted
    )
    return {name: what for name, what in zip(wanted, found) if what}


def describe(step: int, damage: Mapping[str, str]) -> str:
  """One line that says what `find_damage` returned for a step."""
  (name, what), *others = damage.items()
  item, inside, file = name.partition("/")
  where = f"item {item}, file {file}" if inside else f"file {name}"
  more = f"; and {len(others)} more" if others else ""
  return f"step {step}: damaged, {where}: {what}{more}"


def check_whole(
  directory: str | epath.Path, step: int, items: Collection[str] | None = None
) -> None:
  """Checks that a checkpoint is as it was written, before it is used.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: items that will be read; None is all.

  Raises:
    DamagedCheckpointError: it is not; the message names the item and the file,
      and the other checkpoints.
  """
  if damage := find_damage(directory, step, items):
    others = [other for other in list_steps(directory) if other != step]
    raise DamagedCheckpointError(
      f"{directory}, checkpoint of {describe(step, damage)}; other steps: "
      f"{others}"
    )


def newest_whole_step(directory: str | epath.Path) -> int:
  """Finds the newest checkpoint that is whole; warns of newer ones.

  Raises:
    DamagedCheckpointError: none is whole.
  """
  damaged = []
  for step in reversed(list_steps(directory)):
    damage = find_damage(directory, step)
    if not damage:
      for other in damaged:
        _LOG.warning("%s, checkpoint of %s", directory, other)
      if damaged:
        _LOG.warning("using the checkpoint of step %d instead", step)
      return step
    damaged.append(describe(step, damage))
  raise DamagedCheckpointError(
    f"{directory} has no whole checkpoint; {'; '.join(damaged)}"
  )


def set_aside_after(directory: str | epath.Path, step: int) -> None:
  """Moves checkpoints after a step to DIR/checkpoints/damaged/.

  No run continues them. One that continues at `step` will write checkpoints of
  their names again.
  """
  folder = steps_folder(directory) / _SET_ASIDE
  for later in list_steps(directory):
    if later > step:
      folder.mkdir(exist_ok=True)
      names = (f"{later}.{number}" for number in itertools.count(1))
      target = next(t for t in (folder / n for n in names) if not t.exists())
      step_folder(directory, later).rename(target)
      _LOG.warning("the checkpoint of step %d is set aside: %s", later, target)


def write_manifest(folder: epath.Path) -> None:
  """Writes the manifest of all files below a step folder."""
  names = sorted(_files(folder))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    sums = pool.map(lambda name: checksum(folder / name), names)
    lines = "".join(
      f"{digest} {length} {name}\n"
      for name, (digest, length) in zip(names, sums)
    )
  write_whole(folder / MANIFEST, f"{_header(lines)}{lines}".encode())


def read_manifest(folder: epath.Path) -> dict[str, tuple[str, int]]:
  """Reads the manifest of a step folder.

  Returns:
    Checksum and length of each file, by its path.

  Raises:
    ValueError: the manifest is missing or damaged.
    OSError: it cannot be read.
  """
  path = folder / MANIFEST
  if not path.exists():
    raise ValueError("missing")
  header, newline, lines = (
    path.read_bytes().decode(errors="replace").partition("\n")
  )
  if header + newline != _header(lines):
    raise ValueError("damaged")
  parts = (line.split(" ", 2) for line in lines.splitlines())
  return {name: (digest, int(size)) for digest, size, name in parts}


def mark(directory: str | epath.Path, step: int) -> str:
  """Identifies a checkpoint: "STEP:", and the checksum of its checksums."""
  digest, _ = checksum(step_folder(directory, step) / MANIFEST)
  return f"{step}:{digest}"


def _difference(path: epath.Path, digest: str, length: int) -> str:
  """How a file differs from what was written; "" if it does not."""
  try:
    found = path.stat().length
    if found != length:
      return f"{found} bytes, {length} were written"
    if checksum(path) != (digest, length):
      return "its content is not what was written"
  except FileNotFoundError:
    return "missing"
  except OSError as error:
    return f"cannot be read: {error}"
  return ""


def _header(lines: str) -> str:
  return f"{_HEADER}{xxhash.xxh3_128_hexdigest(lines.encode())}\n"


def _files(folder: epath.Path, below: str = "") -> Iterator[str]:
  """Paths of the files below a folder, but for its manifest."""
  for path in (folder / below).iterdir():
    name = f"{below}{path.name}"
    if path.is_dir():
      yield from _files(folder, f"{name}/")
    elif name != MANIFEST:
      yield name


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
  """Loads a config file and changes some of its keys.

  A file whose section `model` names no family starts from another model: the
  section is that of the checkpoint `train.init_from`, with the fields that the
  file and the overrides state.

  Args:
    spec: "FILE" or "FILE:ARG"; the file's `get_config(ARG)` returns a
      ConfigDict or a dict of sections.
    overrides: "section.field=VALUE", later ones win; for instance
      "optim.lr=3e-4", "model.top_k=(1,2)" or "data.path=some/where".

  Returns:
    The checked config.

  Raises:
    FileNotFoundError: there is no such file, or no such checkpoint.
    ValueError: the file fails, or an override or a value does not fit; the
      message names the file or the key.
  """
  cfg = override(run_file(spec), overrides)
  model = cfg.get("model")
  if not isinstance(model, Mapping) or "family" in model:
    return from_config_dict(cfg)
  cfg = _with_model(spec, cfg)
  try:
    return from_config_dict(cfg)
  except ValueError as error:
    family, place = cfg["model"]["family"], cfg["train"]["init_from"]
    whose = f"model.family={family!r} is that of train.init_from={place!r}"
    raise ValueError(f"{error} ({whose})") from error


def _with_model(spec: str, cfg: dict[str, Any]) -> dict[str, Any]:
  """A config with what it leaves to the checkpoint `train.init_from`."""
  train = read_fields("train", TrainConfig, cfg.get("train", {}))
  source = train.get("init_from", "")
  if not source:
    raise ValueError(
      f"{spec} takes its model from a checkpoint, and train.init_from is ''; "
      "add --config.train.init_from=DIR"
    )
  step = find_step(source, None)
  try:
    trained = from_config_dict(read_json_item(source, step)["config"])
  except (KeyError, ValueError) as error:
    raise ValueError(f"train.init_from={source!r}: {error}") from error
  model = trained.model
  stated = read_fields("model", type(model), cfg["model"])
  return merged(model.inherited(trained, stated), cfg)
