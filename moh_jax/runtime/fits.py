"""Refuses runs and models that memory cannot hold, before anything is built.

What is compared are lower bounds: what passes may still be too large.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from moh_jax import memory
from moh_jax.config import Config

HOST_MEMORY = "pinned_host"  # what JAX calls memory that devices reach
_INDEX_BYTES = 8  # of an entry of a table of relative positions
_TOKEN_BYTES = 20  # of a packed sequence: five int32 or float32 arrays


def check_tree(tree: Any, what: str) -> None:
  """Checks that devices can hold their parts of abstract arrays.

  Arrays in the memory of the host are not counted.

  Args:
    tree: ShapeDtypeStructs with shardings.
    what: names them, for the message.

  Raises:
    ValueError: the parts of one device need more memory than it has.
  """
  if leaves := jax.tree.leaves(tree):
    devices = leaves[0].sharding.device_set
    each = _device_bytes(next(iter(devices)), devices)
    memory.check(bytes_on_device(tree), what, each)


def bytes_on_device(tree: Any, in_host: bool = False) -> int:
  """Bytes of one device's parts of abstract arrays with shardings.

  Args:
    tree: ShapeDtypeStructs with shardings.
    in_host: count what lies in the memory of the host, and nothing else; by
      default that is left out.
  """
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
    if (leaf.sharding.memory_kind == HOST_MEMORY) == in_host
  )


def check_host_memory(what: str, mesh: Mesh | AbstractMesh) -> None:
  """Checks that programs on the devices may use memory of their host.

  Args:
    what: asks for it, for the message.
    mesh: the devices; those of an abstract mesh tell nothing of their memory.

  Raises:
    ValueError: they may not.
  """
  if isinstance(mesh, AbstractMesh):
    return
  device = mesh.devices.flat[0]
  kinds = [each.kind for each in device.addressable_memories()]
  if kinds and HOST_MEMORY not in kinds:  # absent GPUs tell none
    raise ValueError(
      f"{what} needs devices with memory of the kind {HOST_MEMORY}; "
      f"{device.device_kind} has {kinds}"
    )


def check_config(config: Config, mesh: Mesh) -> None:
  """Checks a run's batches, position tables and the tokens of one example.

  Args:
    config: of the run.
    mesh: its devices.

  Raises:
    ValueError: one of them needs more memory than there is.
  """
  data, groups = config.data, config.model.layer_groups()
  length = getattr(data, "sequence_length", None)
  shape = getattr(config.model, "input_shape", ())
  example = math.prod(shape) if length is None else _TOKEN_BYTES * length
  memory.check(
    example * (data.prefetch + 1) * (data.batch_size // jax.process_count()),
    f"data.prefetch={data.prefetch} batches of data.batch_size="
    f"{data.batch_size} examples of {example:,} bytes",
  )
  tables = _INDEX_BYTES * sum(group.pairs for group in groups)
  memory.check(tables, "the tables of relative positions at the model's size")
  # Every layer keeps its input for the backward pass, whatever `remat` is.
  width = jnp.dtype(config.model.dtype).itemsize
  kept = sum(
    group.depth * group.width * width * min(group.tokens, length or math.inf)
    for group in groups
  )
  devices = set(mesh.devices.flat)
  each = _device_bytes(mesh.devices.flat[0], devices)
  memory.check(kept, "the layers' inputs of one example", each * len(devices))


def stated_bytes(device: jax.Device) -> int | None:
  """Memory of a device that arrays may take; None where it does not tell."""
  if device.platform == "cpu":
    return None
  try:
    stats = device.memory_stats() or {}
  except jax.errors.JaxRuntimeError:  # compiled for, but not here
    stats = {}
  return stats.get("bytes_limit")


def _device_bytes(device: jax.Device, devices: set[jax.Device]) -> int:
  """Memory of one device; the CPUs of a process share the machine's."""
  if device.platform != "cpu":
    return stated_bytes(device) or 1 << 62
  beside = [d for d in devices if d.process_index == device.process_index]
  return memory.total() // max(1, len(beside))
