"""What may refuse a run: all checks, before anything is compiled.

`train` makes them in this order: those of the processes need nothing but the
config, `check_run` the mesh and the abstract program (as in `plan`), the rest
the working directory and the data. What follows trusts its callers.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import math
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.data.identity import Identity, differences
from moh_jax.layers.linear import LORA_A, LORA_B
from moh_jax.models.adapters import join
from moh_jax.ops.head_layout import check_heads, check_tokens
from moh_jax.runtime import json_files, steps
from moh_jax.runtime.checkpoint import Metadata, read_metadata
from moh_jax.runtime.devices import check_bytes, random_settings
from moh_jax.runtime.peers import agree, ask_first_process
from moh_jax.runtime.run_lock import RunLock
from moh_jax.runtime.sharding import (
  BATCH_AXES,
  HOST_MEMORY,
  check_batch,
  check_tree,
  check_whole,
  device_bytes,
)
from moh_jax.training.step import Program

_LOG = logging.getLogger(__name__)
_INDEX_BYTES = 8  # of an entry of a table of relative positions
_TOKEN_BYTES = 20  # of a packed sequence: five int32 or float32 arrays
# Fields that determine the training stream, the random choices and what the
# optimizer keeps.
_SAME_FIELDS = {
  "optim": ("name",),
  "train": ("seed",),
  "data": (
    *("source", "batch_size", "repeats", "mix", "ratios", "sequence_length"),
    *("separate_documents", "template", "too_long"),
  ),
}
# Fields of which only zero or not matters: it decides the state's structure.
_STRUCTURE_FIELDS = {"optim": ("ema_decay", "clip_norm", "b1")}


def check_processes(config: Config, workdir: str) -> None:
  """Checks that all processes of the run are about to do the same, and can.

  It needs no devices: a process whose mesh is impossible stops the others.

  Raises:
    ValueError: their configs, versions or checkpoints differ, or a package is
      missing that the config asks for.
    OSError: a process does not come.
  """
  wandb = config.log.wandb
  lacking = bool(wandb) and importlib.util.find_spec("wandb") is None
  agree(
    {
      "config": config_lib.to_dict(config),
      "newest checkpoint in the workdir": steps.list_steps(workdir)[-1:],
      "lack of the package wandb": lacking,
    }
  )
  if lacking:
    raise ValueError(
      f"log.wandb={wandb!r} needs the package wandb: "
      "pip install 'moh_jax[wandb]'"
    )


def check_run(
  config: Config, mesh: Mesh | AbstractMesh, program: Program
) -> None:
  """Checks what a config and its devices allow.

  Args:
    config: of the run.
    mesh: the devices, which may be absent or abstract; what is abstract tells
      nothing of memory.
    program: of the run, for these devices.

  Raises:
    ValueError: names what does not fit.
  """
  if config.model.router.top_p:
    raise ValueError(
      f"model.router.top_p={config.model.router.top_p} must be 0 in training: "
      "it serves a trained model"
    )
  _check_teacher(config, program)
  check_mixed_images(config, mesh)
  check_host_memory(config, mesh)
  # Devices have equally many examples of a microbatch or an evaluation.
  batch, parts = config.data.batch_size, config.optim.accumulation
  check_batch("data.batch_size", batch, mesh, parts)
  check_batch("eval.batch_size", config.eval.batch_size, mesh)
  # The mesh can split the heads, and the tokens of an example.
  check_heads(config.model, mesh, config.mesh.max_imbalance)
  length = getattr(config.data, "sequence_length", None)
  check_tokens(config.model, mesh, length)
  # An axis splits parameters, and less than `mesh.max_whole` stays whole.
  boxed, adapters = program.boxed, program.adapters
  if adapters is not None:
    boxed = join(adapters.frozen, adapters.trained)
  if line := check_whole(boxed, mesh.shape, config.mesh.max_whole):
    _LOG.info("mesh: %s", line)
  check_memory(config, mesh, program)


def _check_teacher(config: Config, program: Program) -> None:
  """Teachers and references do not change: none of what they use is trained."""
  weight, lora = config.tune.distill.weight, config.tune.lora
  if not weight and not config.prefers:
    return
  if not lora.rank:  # a teacher's config has them; a served one may lack them
    raise ValueError(
      f"tune.lora.rank={lora.rank} must be above 0 where data.source="
      "'preference': the reference is the model without its adapters"
    )
  for path in flatten_dict(program.state.params):
    used = config.prefers or "router" not in path  # a teacher has no routers
    if path[-1] not in (LORA_A, LORA_B) and used:
      allowed, where = "routers alone", f"tune.distill.weight={weight}"
      if config.prefers:
        allowed, where = "nothing", "data.source='preference'"
      raise ValueError(
        f"tune.lora.whole={lora.whole} must name {allowed} where "
        f"{where}, not {'/'.join(path)}: what adapters are compared with would "
        "change with it"
      )


def check_mixed_images(config: Config, mesh: Mesh | AbstractMesh) -> None:
  """Images of slices are mixed with others of their device, so need one."""
  batch, classifier = config.data.batch_size, config.sections.get("classifier")
  each = batch // config.optim.accumulation
  each //= math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  if classifier and classifier.mixes and config.mesh.dcn_data > 1 and each < 2:
    raise ValueError(
      f"data.batch_size={batch} must leave two images or more on each device, "
      f"where it is {each}: with mesh.dcn_data={config.mesh.dcn_data}, "
      f"classifier.mixup={classifier.mixup} and classifier.cutmix="
      f"{classifier.cutmix} mix the images of a device"
    )


def check_host_memory(config: Config, mesh: Mesh | AbstractMesh) -> None:
  """Devices can use memory of their host where the config asks for it."""
  asked = []
  if config.model.remat == "offload":
    asked.append("model.remat='offload'")
  if config.optim.state_memory == "host":
    asked.append("optim.state_memory='host'")
  if not asked or isinstance(mesh, AbstractMesh):
    return
  device = mesh.devices.flat[0]
  kinds = [one.kind for one in device.addressable_memories()]
  if kinds and HOST_MEMORY not in kinds:  # absent GPUs tell none
    raise ValueError(
      f"{asked[0]} needs devices with memory of the kind {HOST_MEMORY}; "
      f"{device.device_kind} has {kinds}"
    )


def check_memory(
  config: Config, mesh: Mesh | AbstractMesh, program: Program
) -> None:
  """Lower bounds are less than memory: what passes may still be too large.

  They are those of the batches that are prepared ahead, of the tables of
  relative positions, of the layers' inputs of one example, and of the state.

  Raises:
    ValueError: one of them is larger than the memory that there is.
  """
  if isinstance(mesh, AbstractMesh):
    return
  data, groups = config.data, config.model.layer_groups()
  length = getattr(data, "sequence_length", None)
  shape = getattr(config.model, "input_shape", ())
  example = math.prod(shape) if length is None else _TOKEN_BYTES * length
  check_bytes(
    example * (data.prefetch + 1) * (data.batch_size // jax.process_count()),
    f"data.prefetch={data.prefetch} batches of data.batch_size="
    f"{data.batch_size} examples of {example:,} bytes",
  )
  tables = _INDEX_BYTES * sum(group.pairs for group in groups)
  check_bytes(tables, "the tables of relative positions at the model's size")
  # Every layer keeps its input for the backward pass, whatever `remat` is.
  width = jnp.dtype(config.model.dtype).itemsize
  kept = sum(
    group.depth * group.width * width * min(group.tokens, length or math.inf)
    for group in groups
  )
  devices = set(mesh.devices.flat)
  each = device_bytes(mesh.devices.flat[0], devices)
  check_bytes(kept, "the layers' inputs of one example", each * len(devices))
  state = "the state of the run (parameters and optimizer)"
  check_tree((program.state, program.frozen), state)


def check_writable(workdir: str) -> epath.Path:
  """Creates the working directory and proves that it can be written.

  Returns:
    Its absolute path.

  Raises:
    OSError: it cannot; the message names the directory and the reason.
  """
  directory = steps.absolute(workdir)
  probe = directory / f".write_probe.{uuid.uuid4().hex}"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise OSError(f"workdir {directory} cannot be written: {error}") from error
  return directory


@contextlib.contextmanager
def hold_lock(directory: epath.Path) -> Iterator[RunLock]:
  """Context that holds the lock of the working directory, in the first process.

  Raises:
    RunningError: another run has it.
    OSError: it cannot be written.
  """
  lock = RunLock(directory)
  ask_first_process(lock.take)
  try:
    yield lock
  finally:
    lock.release()


def check_same_run(
  workdir: str | epath.Path,
  step: int | None,
  ours: Metadata,
  stream: Mapping[str, Identity],
  verify: bool = True,
) -> None:
  """Checks that a run would continue a checkpoint, and says what changes.

  Args:
    workdir: working directory.
    step: step of the checkpoint that is to be continued; None for a new run.
    ours: metadata of the run that continues it.
    stream: identity of its data, by source.
    verify: compare the metadata with their checksums first.

  Raises:
    ValueError: parameters, order of the data or random choices would differ
      (the message names the fields), the checkpoint is beyond the run's end, or
      a source's identity holds other than integers and texts.
  """
  for name, one in stream.items():
    where = f"the identity of data {name!r}"
    json_files.check_json(one, dict[str, int | str], where)
  if step is None:
    return
  metadata, _ = read_metadata(workdir, step, verify=verify)
  config, stored = ours.config, metadata.config
  if step > config.train.steps:
    raise ValueError(
      f"workdir {workdir} is at step {step}, beyond train.steps="
      f"{config.train.steps}"
    )
  fields = _differing(config.model, stored.model, "model")
  fields += _differing(config.tune, stored.tune, "tune")
  for name in sorted(config.sections.keys() & stored.sections.keys()):
    fields += _differing(config.sections[name], stored.sections[name], name)
  if ours.tokenizer_sha256 != metadata.tokenizer_sha256:
    fields.append(
      f"sha256 of the tokenizer: {ours.tokenizer_sha256[:16]!r} here, "
      f"{metadata.tokenizer_sha256[:16]!r} there"
    )
  for table, as_stored in (
    (_SAME_FIELDS, lambda x: x),
    (_STRUCTURE_FIELDS, bool),
  ):
    for section, names in table.items():
      parts = getattr(config, section), getattr(stored, section)
      for name in names:
        # A field that the family's section lacks is None twice.
        here, there = (getattr(part, name, None) for part in parts)
        if as_stored(here) != as_stored(there):
          fields.append(f"{section}.{name}: {here!r} here, {there!r} there")
  data = steps.read_json_item(workdir, step, "data")
  there = data.get("random")
  if there is not None:
    found = json_files.differences(random_settings(), there)
    fields += [found] if found else []
  if not fields:  # the same config, so that the data should be the same too
    stored_stream = data.get("stream")
    if stored_stream is not None:
      fields = differences(stream, stored_stream)
  if fields:
    raise ValueError(
      f"workdir {workdir} holds another run's checkpoint; "
      f"{'; '.join(fields)}. Choose another workdir, or the same config, data "
      "and settings of JAX"
    )
  before = stored.by_name()
  changed = [
    line
    for name, section in config.by_name().items()
    for line in config_lib.differing_fields(section, before[name], name)
  ]
  if changed:
    _LOG.info("from step %d on, changed: %s", step, "; ".join(changed))


def _differing(ours: Any, theirs: Any, section: str) -> list[str]:
  """Describes fields that differ and that a continued run must not change."""
  if type(theirs) is type(ours):
    runtime = getattr(ours, "RUNTIME_FIELDS", ())
    same = {name: getattr(ours, name) for name in runtime}
    theirs = dataclasses.replace(theirs, **same)
  return config_lib.differing_fields(ours, theirs, section)
