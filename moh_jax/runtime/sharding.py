"""Device mesh, and the table that maps logical axes to mesh axes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moh_jax.config import LayerGroup, MeshConfig, RoutedLayers, get_family
from moh_jax.layers.partitioning import resolve_spec
from moh_jax.ops.head_placement import HeadPlacement

AXES = MeshConfig.AXES
BATCH_AXES = ("data", "fsdp")

# Logical axis -> mesh axis. Parameters are split over `fsdp` along the model
# width and over `tensor` along heads and MLP columns.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
  ("batch", BATCH_AXES),
  ("embed", "fsdp"),
  ("heads", "tensor"),
  ("head_dim", None),
  ("mlp", "tensor"),
  ("classes", "tensor"),
  ("vocab", "tensor"),
  ("layers", None),
)


def axis_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
  """Sizes of the mesh's axes.

  Args:
    config: number of devices along each axis; -1 takes what is left.
    devices: number of devices.

  Raises:
    ValueError: the axes do not multiply to the number of devices.
    NotImplementedError: the axis `sequence` is larger than 1.
  """
  sizes = {axis: getattr(config, axis) for axis in AXES}
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if -1 in sizes.values():
    if devices % fixed:
      raise ValueError(
        f"mesh={sizes} must divide the {devices} devices; the fixed axes "
        f"multiply to {fixed}"
      )
    rest = devices // fixed
    sizes = {axis: rest if s == -1 else s for axis, s in sizes.items()}
  elif fixed != devices:
    raise ValueError(
      f"mesh={sizes} needs {fixed} devices, there are {devices}; set one "
      "axis to -1 to take what is left"
    )
  if sizes["sequence"] > 1:
    raise NotImplementedError(
      f"mesh.sequence={sizes['sequence']}: must be 1 so far"
    )
  return sizes


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
  """Builds the device mesh.

  Args:
    config: number of devices along each axis; -1 takes what is left.
    devices: devices of the mesh; None is all devices of all processes.

  Raises:
    ValueError: the axes do not multiply to the number of devices.
    NotImplementedError: the axis `sequence` is larger than 1.
  """
  devices = devices or jax.devices()
  sizes = axis_sizes(config, len(devices))
  return jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
  """Context in which the models' sharding constraints refer to this mesh."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    yield


def check_batch(name: str, size: int, mesh: Mesh, parts: int = 1) -> None:
  """Checks that a global batch can be split over the mesh.

  Args:
    name: name of the config field, for the message.
    size: examples in the batch.
    mesh: the devices.
    parts: number of microbatches of a step.

  Raises:
    ValueError: a microbatch cannot be split evenly over mesh.data x mesh.fsdp.
  """
  shards = _batch_shards(mesh)
  if size % (shards * parts):
    raise ValueError(
      f"{name}={size} must be a multiple of {shards * parts}: mesh.data x "
      f"mesh.fsdp = {shards} shards, in {parts} microbatch(es)"
    )


def check_heads(
  model: RoutedLayers, mesh: Mesh, max_imbalance: float = math.inf
) -> None:
  """Checks that the heads of every layer can be split over the mesh.

  Args:
    model: the config's section of the model.
    mesh: the devices.
    max_imbalance: see `MeshConfig`.

  Raises:
    ValueError: mesh.tensor does not divide a layer's key/value heads, or leaves
      more active heads on a device than on others.
  """
  devices = mesh.shape["tensor"]
  for index, group in enumerate(model.layer_groups(), 1):
    placement = head_placement(group, devices)
    place = f"mesh.tensor={devices}: the {index}. group of equal layers has"
    if placement is None:
      raise ValueError(
        f"{place} {group.kv_heads or group.budget.num_heads} key/value heads, "
        "must be a multiple of it"
      )
    if computes_all_heads(model, group):
      continue
    ratio = placement.imbalance(group.budget)
    if ratio > max_imbalance:
      raise ValueError(
        f"{place} {group.budget.shared} shared heads of "
        f"{group.budget.num_heads}: the busiest device would have {ratio:.3f} "
        "times the mean of active heads, allowed is "
        f"mesh.max_imbalance={max_imbalance}"
      )


def computes_all_heads(model: RoutedLayers, group: LayerGroup) -> bool:
  """Whether a layer computes every head for all tokens, in training too."""
  biased = get_family(model.family).position_bias
  return biased or group.sees == "window" or model.router.needs_all_heads


def head_placement(group: LayerGroup, devices: int) -> HeadPlacement | None:
  """How a tensor axis holds a layer's heads; None if it cannot split them."""
  heads = group.budget.num_heads
  kv_heads = group.kv_heads or heads
  if kv_heads % devices:
    return None
  return HeadPlacement(heads, kv_heads, devices)


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding with the whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
  """Shardings of parameters, from their logical axes.

  Args:
    boxed: abstract parameters in Linen's boxes of logical axes, see
      `params.abstract_params`.
    mesh: the devices.

  Returns:
    Tree of NamedSharding with the structure of the unboxed parameters.
    Parameters without logical axes are replicated.
  """
  sizes = dict(mesh.shape)

  def one(leaf: Any) -> NamedSharding:
    if not isinstance(leaf, nn.LogicallyPartitioned):
      return replicated(mesh)
    spec = resolve_spec(leaf.names, leaf.value.shape, sizes, RULES)
    return NamedSharding(mesh, spec)

  return jax.tree.map(
    one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )


def batch_slice(mesh: Mesh) -> tuple[int, int]:
  """Part of every global batch that this process reads.

  Processes whose devices hold the same shards of the batch read the same part,
  for example where the tensor axis spans hosts.

  Args:
    mesh: the devices.

  Returns:
    Index of the part, and number of parts.

  Raises:
    ValueError: two processes share some shards of the batch, but not all.
  """
  shards = _batch_shards(mesh)
  sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  held: dict[int, set[int]] = {}
  for device, index in sharding.devices_indices_map((shards,)).items():
    start = index[0].indices(shards)[0]
    held.setdefault(device.process_index, set()).add(start)
  parts = sorted({tuple(sorted(part)) for part in held.values()})
  if sum(map(len, parts)) != shards or len({len(part) for part in parts}) > 1:
    raise ValueError(
      f"mesh={dict(mesh.shape)} splits the batch unevenly over processes: "
      f"their shards are {parts}; mesh.data x mesh.fsdp must divide, or be a "
      "multiple of, the number of processes"
    )
  return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
  """Makes global arrays from this process's part of a batch.

  Args:
    batch: tree of host arrays [b, ...], the part that `batch_slice` tells; b is
      the global batch size B over the number of parts.
    mesh: the devices.

  Returns:
    Tree of arrays [B, ...], split over the axes data and fsdp.
  """
  sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  _, parts = batch_slice(mesh)

  def one(x: np.ndarray) -> jax.Array:
    shape = (x.shape[0] * parts, *x.shape[1:])
    return jax.make_array_from_process_local_data(sharding, x, shape)

  return jax.tree.map(one, batch)


def put_batch(array: np.ndarray, mesh: Mesh) -> jax.Array:
  """Splits an array over the axes data and fsdp; every process has all of it.

  Args:
    array: [B, ...], the same on every process.
    mesh: the devices.
  """
  sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


def pad_to_shards(array: np.ndarray, mesh: Mesh) -> np.ndarray:
  """Repeats the last example until the axes data and fsdp divide the length.

  Args:
    array: [B, ...] with B of at least 1.
    mesh: the devices.
  """
  missing = -len(array) % _batch_shards(mesh)
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def gather(arrays: Any, mesh: Mesh) -> Any:
  """Copies the global arrays of a tree to host arrays, on every process."""
  whole = _gather_on(replicated(mesh))(arrays)
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), whole)


@functools.cache
def _gather_on(target: NamedSharding) -> Callable[[Any], Any]:
  """Identity with a target sharding, cached so that it compiles only once."""
  return jax.jit(lambda x: x, out_shardings=target)


def _batch_shards(mesh: Mesh) -> int:
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
