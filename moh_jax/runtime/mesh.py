"""The mesh of a run's devices, and the table of logical axes."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moh_jax.config import MeshConfig

AXES = MeshConfig.AXES
BATCH_AXES = ("data", "fsdp")

# Logical axis -> mesh axes. An axis that two dimensions of an array are mapped
# to splits that of the first rule. Parameters are split over `tensor` along
# heads and MLP columns and over `fsdp` along the model width; tables with a row
# or column for every token over both along these, so that no device has more.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
  ("batch", BATCH_AXES),
  ("tokens", "sequence"),
  ("vocab", ("tensor", "fsdp")),
  ("heads", "tensor"),
  ("attended_heads", ("tensor", "sequence")),
  ("mlp", "tensor"),
  ("classes", "tensor"),
  ("embed", "fsdp"),
  ("rank", "fsdp"),
  ("head_dim", None),
  ("layers", None),
  ("devices", AXES),  # a dimension of any size
)


def resolve_spec(
  names: Sequence[str | None],
  shape: Sequence[int],
  axis_sizes: dict[str, int],
  rules: Sequence[tuple[str, str | tuple[str, ...] | None]],
) -> PartitionSpec:
  """Maps the logical names of an array's dimensions to mesh axes.

  Axes that do not divide a dimension's size (three heads on two devices) do not
  split it; of several axes the first ones that do are used. A mesh axis splits
  one dimension at most, that of the name whose rule comes first.

  Args:
    names: one logical name, or None, per dimension.
    shape: the array's shape.
    axis_sizes: size of every mesh axis.
    rules: logical name -> mesh axis or axes.

  Returns:
    The partition spec, one entry per dimension.

  Raises:
    ValueError: a name that no rule mentions.
  """
  table = dict(rules)
  for name in names:
    if name is not None and name not in table:
      raise ValueError(
        f"logical axis {name!r} has no sharding rule; known: {sorted(table)}"
      )
  used: set[str] = set()
  entries: list[tuple[str, ...] | None] = [None] * len(names)
  for rule, mapped in table.items():
    axes = axes_of_entry(mapped)
    for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
      if name != rule:
        continue
      free = tuple(a for a in axes if axis_sizes[a] > 1 and a not in used)
      while free and size % math.prod(axis_sizes[a] for a in free):
        free = free[:-1]
      if free:
        used.update(free)
        entries[dim] = free
  return PartitionSpec(*entries)


def axes_of_entry(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes that an entry of a rule or of a PartitionSpec names."""
  return (entry,) if isinstance(entry, str) else entry or ()


def axis_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
  """Sizes of the mesh's axes; that of `data` counts the devices of all slices.

  Args:
    config: number of slices, and of devices along each axis in a slice; -1
      takes what is left.
    devices: number of devices, of all slices.

  Raises:
    ValueError: the axes do not multiply to the number of devices.
  """
  slices = config.dcn_data
  if devices % slices:
    raise ValueError(
      f"mesh.dcn_data={slices} must divide the {devices} devices"
    )
  sizes = {axis: getattr(config, axis) for axis in AXES}
  fixed = math.prod(size for size in sizes.values() if size != -1)
  each = devices // slices
  where = f"{each} devices" + (" of a slice" if slices > 1 else "")
  if -1 in sizes.values():
    if each % fixed:
      raise ValueError(
        f"mesh={sizes} must divide the {where}; the fixed axes multiply to "
        f"{fixed}: choose one that does"
      )
  elif fixed != each:
    raise ValueError(
      f"mesh={sizes} needs {fixed} devices, there are {where}; set one axis to "
      "-1 to take what is left"
    )
  sizes = {a: each // fixed if s == -1 else s for a, s in sizes.items()}
  return {**sizes, "data": sizes["data"] * slices}


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
  """Builds the device mesh; its axis `data` runs through all slices.

  Devices of several slices (TPU pods that a data center's network joins) are
  laid out slice by slice, so that only the axis `data` crosses from one slice
  to another.

  Args:
    config: number of slices, and of devices along each axis in a slice; -1
      takes what is left.
    devices: devices of the mesh; None is all devices of all processes.

  Raises:
    ValueError: the axes do not multiply to the number of devices, or the
      devices are of more slices, or fewer.
  """
  devices = devices or jax.devices()
  slices = _slices(config, devices)
  sizes = axis_sizes(config, len(devices))
  sizes["data"] //= len(slices)
  layouts = [
    mesh_utils.create_device_mesh(
      tuple(sizes.values()), part, allow_split_physical_axes=True
    )
    for part in slices
  ]
  return Mesh(
    np.concatenate(layouts), AXES, axis_types=(AxisType.Auto,) * len(AXES)
  )


def _slices(config: MeshConfig, devices: list) -> list[list]:
  """Splits devices into the slices that the data axis crosses."""
  by_slice: dict[int, list] = {}
  for device in devices:
    by_slice.setdefault(_slice_of(device), []).append(device)
  count = len(by_slice)
  if config.dcn_data == 1 and devices[0].platform == "gpu":
    return [list(devices)]  # every axis may cross between the hosts of GPUs
  if config.dcn_data != count:
    raise ValueError(
      f"mesh.dcn_data={config.dcn_data} must be {count}: the {len(devices)} "
      f"devices are of {count} slice(s), and only the data axis crosses slices"
    )
  parts = [by_slice[index] for index in sorted(by_slice)]
  if len({len(part) for part in parts}) > 1:
    raise ValueError(
      f"mesh.dcn_data={count} needs slices of equal size, their numbers of "
      f"devices are {[len(part) for part in parts]}"
    )
  return parts


def _slice_of(device: jax.Device) -> int:
  """Index of the slice that a device belongs to."""
  return getattr(device, "slice_index", None) or 0


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
  """Context in which the models' sharding constraints refer to this mesh."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    yield


def batch_shards(mesh: Mesh) -> int:
  """Number of parts that a mesh splits every batch into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch(name: str, size: int, mesh: Mesh, parts: int = 1) -> None:
  """Checks that a global batch can be split over the mesh.

  Args:
    name: name of the config field, for the message.
    size: examples in the batch.
    mesh: the devices.
    parts: number of microbatches of a step.

  Raises:
    ValueError: a microbatch cannot be split evenly over mesh.data x mesh.fsdp;
      names a value that can.
  """
  shards = batch_shards(mesh)
  if size % (shards * parts):
    fits = f"{name}={math.ceil(size / shards / parts) * shards * parts}"
    if fewer := fitting_parts(size, mesh, parts):
      fits = f"optim.accumulation={fewer} or {fits}"
    raise ValueError(
      f"{name}={size} must be a multiple of {shards * parts}: mesh.data x "
      f"mesh.fsdp = {shards} shards, in {parts} microbatch(es); {fits} fits"
    )


def fitting_parts(size: int, mesh: Mesh, most: int) -> int | None:
  """The most microbatches, up to `most`, that split a batch; None if none do.

  Args:
    size: examples in the batch.
    mesh: the devices.
    most: number of microbatches.
  """
  shards = batch_shards(mesh)
  fit = (n for n in range(most, 0, -1) if size % (shards * n) == 0)
  return next(fit, None)


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding with the whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def split_by_batch(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays [B, ...] over the axes of the batch."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
