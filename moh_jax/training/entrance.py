"""Checks of a run before anything is compiled; `warm_start` has its own.

`check_processes` needs the config alone, `check_run` the mesh and the abstract
program (as in `plan`), the rest the working directory and the data. The
steps of the run check none of this again.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

import filelock
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from moh_jax.config import Config, to_dict
from moh_jax.config.base import differing
from moh_jax.config.parse import differing_keys
from moh_jax.data.files import Identity
from moh_jax.layers.linear import LORA_A, LORA_B
from moh_jax.ops.placement import check_heads, check_tokens
from moh_jax.runtime import steps
from moh_jax.runtime.checkpoint import Metadata, read_metadata
from moh_jax.runtime.devices import random_settings
from moh_jax.runtime.files import differences
from moh_jax.runtime.mesh import check_batch
from moh_jax.runtime.processes import agree, ask_first_process
from moh_jax.training.step import Program

# Fields that determine the training stream, the random choices and what the
# optimizer keeps, by their sections.
_SAME_FIELDS = {
  "optim": ("name",),
  "train": ("seed",),
  "data": (
    *("source", "batch_size", "repeats", "mix", "ratios", "sequence_length"),
    *("separate_documents", "template", "too_long"),
  ),
}
# Fields of the optimizer of which only zero or not matters: it decides the
# structure of its state.
_STRUCTURE_FIELDS = "ema_decay", "clip_norm", "b1", "skip_nonfinite"


def check_processes(config: Config, workdir: str) -> None:
  """Checks that all processes of the run are about to do the same.

  Raises:
    FileNotFoundError: `train.init_from` holds no checkpoint.
    ValueError: their configs, versions or checkpoints differ, or the package
      wandb is missing that the config asks for.
  """
  newest = steps.list_steps(workdir)[-1:]
  agree({"config": to_dict(config), "newest checkpoint": newest})
  if config.train.init_from and not newest:
    steps.find_step(config.train.init_from, None)
  if config.log.wandb and importlib.util.find_spec("wandb") is None:
    raise ValueError(
      f"log.wandb={config.log.wandb!r} needs the package wandb: "
      "pip install '.[wandb]' in the clone of moh_jax"
    )


def check_run(
  config: Config,
  mesh: Mesh | AbstractMesh,
  program: Program,
  *,
  evaluates: bool = True,
) -> None:
  """Checks what a config and its devices allow.

  Args:
    config: of the run.
    mesh: the devices, which may be absent or abstract.
    program: of the run, for these devices.
    evaluates: whether `eval.batch_size` is used.

  Raises:
    ValueError: names all that does not fit.
  """
  batch, parts = config.data.batch_size, config.optim.accumulation
  length = getattr(config.data, "sequence_length", None)
  # Devices have equally many examples of a microbatch or an evaluation, and
  # the mesh can split the heads, and the tokens of an example.
  checks = [
    lambda: _check_reference(config, program),
    lambda: check_batch("data.batch_size", batch, mesh, parts),
    lambda: check_heads(config.model, mesh),
    lambda: check_tokens(config.model, mesh, length),
  ]
  if evaluates:
    size = config.eval.batch_size
    checks.append(lambda: check_batch("eval.batch_size", size, mesh))
  found = []
  for check in checks:
    try:
      check()
    except ValueError as error:
      found.append(str(error))
  if found:
    raise ValueError("; ".join(found))


def _check_reference(config: Config, program: Program) -> None:
  """Teachers and references do not change: none of what they use is trained."""
  if not config.prefers and not config.tune.distill.weight:
    return
  if not config.tune.lora.rank:
    raise ValueError(
      "tune.lora.rank=0 must be above 0 where data.source='preference': the "
      "reference is the model without its adapters"
    )
  for path in flatten_dict(program.state.params):
    used = config.prefers or "router" not in path  # a teacher has no routers
    if path[-1] not in (LORA_A, LORA_B) and used:
      raise ValueError(
        f"tune.lora.whole={config.tune.lora.whole} must not name "
        f"{'/'.join(path)}: what adapters are compared with would change"
      )


@contextlib.contextmanager
def own_directory(workdir: str) -> Iterator[epath.Path]:
  """A block that has the working directory to itself; buckets have no lock.

  Yields:
    Its absolute path.

  Raises:
    OSError: it cannot be written, or belongs to another run.
  """
  directory = steps.absolute(workdir)
  lock = filelock.FileLock(f"{os.fspath(directory)}/run.lock")

  def take() -> None:
    try:
      directory.mkdir(parents=True, exist_ok=True)
      if not steps.in_bucket(directory):
        lock.acquire(timeout=0)
    except filelock.Timeout:
      raise OSError(
        f"workdir {directory} belongs to a run that is going on; stop it "
        "first, or choose another workdir"
      ) from None
    except OSError as error:
      raise OSError(
        f"workdir {directory} cannot be written: {error}"
      ) from error

  ask_first_process(take)
  try:
    yield directory
  finally:
    lock.release()


def check_same_run(
  directory: epath.Path,
  step: int | None,
  ours: Metadata,
  stream: Mapping[str, Identity],
) -> list[str]:
  """Checks that a run would continue a checkpoint.

  Args:
    directory: working directory.
    step: step of the checkpoint that is to be continued; None for a new run.
    ours: metadata of the run that continues it.
    stream: identity of its data, by source.

  Returns:
    What changes, in words, by config key.

  Raises:
    ValueError: parameters, order of the data or random choices would differ
      (the message names the fields).
  """
  if step is None:
    return []
  metadata, _ = read_metadata(directory, step)
  if not (steps.step_folder(directory, step) / "data").is_dir():
    raise ValueError(
      f"workdir {directory} holds a model, not a run; choose another workdir, "
      f"with train.init_from={str(directory)!r} to start from that model"
    )
  data = steps.read_json_item(directory, step, "data")
  here = _fixed(ours, random_settings())
  fields = differing(here, _fixed(metadata, data["random"]))
  # The same config, so that the data should be the same too.
  for name in () if fields else sorted({**stream, **data["stream"]}):
    both = (of.get(name, {}) for of in (stream, data["stream"]))
    if found := differences(*both):
      fields.append(f"data {name!r}: {found}")
  if fields:
    raise ValueError(
      f"workdir {directory} holds another run's checkpoint; "
      f"{'; '.join(fields)}. Choose the same values (optim.accumulation may "
      "change: a batch in parts takes less memory), or another workdir, where "
      f"train.init_from={str(directory)!r} takes the parameters, if they fit"
    )
  return differing_keys(ours.config, metadata.config)


def _fixed(metadata: Metadata, random: Mapping[str, Any]) -> dict[str, Any]:
  """What a continued run must not change, by its name.

  Args:
    metadata: of the run.
    random: see `random_settings`.
  """
  config, sections = metadata.config, metadata.config.by_name()
  found = {"sha256 of the tokenizer": metadata.tokenizer_sha256, **random}
  for name in ("model", "tune", *config.sections):
    free = getattr(sections[name], "RUNTIME_FIELDS", ())
    fields = dataclasses.asdict(sections[name]).items()
    fields = {field: value for field, value in fields if field not in free}
    found |= flatten_dict({name: fields}, sep=".")
  for section, names in _SAME_FIELDS.items():
    for name in names:  # a field that the family's section lacks is None
      found[f"{section}.{name}"] = getattr(sections[section], name, None)
  for name in _STRUCTURE_FIELDS:
    found[f"optim.{name}"] = bool(getattr(config.optim, name))
  return found
