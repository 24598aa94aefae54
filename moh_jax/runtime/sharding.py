"""The device mesh, the table of logical axes, parameters and arrays on it."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

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
  """Sizes of the mesh's axes; `data` is all of the data axis's devices.

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
        f"{fixed}"
      )
  elif fixed != each:
    raise ValueError(
      f"mesh={sizes} needs {fixed} devices, there are {where}; set one axis to "
      "-1 to take what is left"
    )
  sizes = {a: each // fixed if s == -1 else s for a, s in sizes.items()}
  return {**sizes, "data": sizes["data"] * slices}


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
  """Builds the device mesh; its axis `data` is all of the data axis's devices.

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
  shards = batch_shards(mesh)
  if size % (shards * parts):
    raise ValueError(
      f"{name}={size} must be a multiple of {shards * parts}: mesh.data x "
      f"mesh.fsdp = {shards} shards, in {parts} microbatch(es)"
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding with the whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_rows(mesh: Mesh, size: int, process: int | None = None) -> np.ndarray:
  """Rows of every global batch that a process reads: those of its devices.

  They need not follow each other. In a TPU slice of 4 x 4 chips, with the order
  of devices that JAX gives for mesh.data=16, process 0 of 4 holds the shards 0,
  1, 6 and 15. Processes whose devices hold the same shards read the same rows,
  for example where the tensor axis spans hosts.

  Args:
    mesh: the devices.
    size: examples in the batch, see `check_batch`.
    process: index of the process; None is this one.

  Returns:
    [rows] int64, ascending.
  """
  shards = batch_shards(mesh)
  held = _held_shards(mesh, process)
  each = size // shards
  return (held[:, None] * each + np.arange(each)).reshape(-1)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
  """Makes global arrays from this process's rows of a batch.

  Args:
    batch: tree of host arrays [b, ...], the rows that `batch_rows` tells.
    mesh: the devices.

  Returns:
    Tree of arrays [B, ...], split over the axes data and fsdp.
  """
  sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  shards, held = batch_shards(mesh), len(_held_shards(mesh))

  def one(x: np.ndarray) -> jax.Array:
    size = len(x) // held * shards
    rows = batch_rows(mesh, size)
    return jax.make_array_from_callback(
      (size, *x.shape[1:]), sharding, lambda index: x[local_rows(rows, index)]
    )

  return jax.tree.map(one, batch)


def local_rows(rows: np.ndarray, index: tuple[slice, ...]) -> slice:
  """Where a process's part of a batch has the rows of one device.

  Args:
    rows: of the global batch that the process holds, see `batch_rows`.
    index: the device's part of the global array.
  """
  start, stop, _ = index[0].indices(rows[-1] + 1)
  first = int(np.searchsorted(rows, start))
  return slice(first, first + stop - start)


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
  missing = -len(array) % batch_shards(mesh)
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def gather(arrays: Any) -> Any:
  """Copies the arrays of a tree to the host, global ones to every process."""

  def copy(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
      return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)  # a process's own, which others need not have

  return jax.tree.map(copy, arrays)


def check_finite(tree: Any, what: str) -> None:
  """Raises FloatingPointError where arrays or numbers of a tree are not finite.

  Arrays may be global ones; `what` names the tree.
  """
  found = jax.tree_util.tree_leaves_with_path(tree)
  for (path, _), finite in zip(found, _are_finite([x for _, x in found])):
    if not finite:
      place = jax.tree_util.keystr(path, simple=True, separator="/")
      where = f" (in {place})" if place else ""
      raise FloatingPointError(f"{what} are NaN or infinite{where}")


@jax.jit
def _are_finite(leaves: Sequence[jax.Array]) -> list[jax.Array]:
  return [jnp.isfinite(leaf).all() for leaf in leaves]


def batch_shards(mesh: Mesh) -> int:
  """Number of parts that a mesh splits every batch into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def _held_shards(mesh: Mesh, process: int | None = None) -> np.ndarray:
  """Indices of the batch's shards that a process's devices hold, ascending."""
  process = jax.process_index() if process is None else process
  # The axes of the batch are the first ones of the mesh.
  by_shard = mesh.devices.reshape(batch_shards(mesh), -1)
  mine = [any(d.process_index == process for d in row) for row in by_shard]
  return np.flatnonzero(mine)


def bytes_on_device(tree: Any) -> int:
  """Bytes of one device's parts of ShapeDtypeStructs with shardings."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def init_params(model: nn.Module, rng: jax.Array, inputs: Any) -> Any:
  """Initialises parameters, in boxes that hold their logical axes.

  It runs without sharding rules. With rules, Linen constrains each parameter
  when it is unboxed, which fails for dimensions that the mesh does not divide;
  a jitted initialization takes its shardings from `out_shardings` instead.

  Args:
    model: Linen module.
    rng: key of the initialization.
    inputs: positional arguments of the module.
  """
  with nn.logical_axis_rules(()):
    return model.init(rng, *inputs)["params"]


def unbox(boxed: Any) -> Any:
  """Takes parameters out of the boxes that hold their logical axes."""
  with nn.logical_axis_rules(()):
    return nn.unbox(boxed)


def abstract_params(model: nn.Module, inputs: Any) -> Any:
  """Boxed parameters as ShapeDtypeStructs; computes nothing.

  Args:
    model: Linen module.
    inputs: positional arguments of the module, abstract or not.
  """
  key = jax.random.key(0)
  return jax.eval_shape(lambda *args: init_params(model, key, args), *inputs)


def abstract_on(model: nn.Module, inputs: Any, mesh: Mesh | None) -> Any:
  """Unboxed parameters as ShapeDtypeStructs with shardings, to restore into.

  Args:
    model: Linen module.
    inputs: abstract positional arguments of the module.
    mesh: the devices; None is the first device alone.
  """
  return abstract_boxed(abstract_params(model, inputs), mesh)


def abstract_boxed(boxed: Any, mesh: Mesh | AbstractMesh | None) -> Any:
  """Takes abstract parameters out of their boxes; they get shardings.

  Args:
    boxed: abstract parameters in boxes of logical axes; those without a box are
      replicated.
    mesh: the devices; None is the first device alone.
  """
  device = None
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def sharding(leaf: Any) -> jax.sharding.Sharding:
    if device is not None or not is_box(leaf):
      return device or replicated(mesh)
    sizes = dict(mesh.shape)
    spec = resolve_spec(leaf.names, leaf.value.shape, sizes, RULES)
    return NamedSharding(mesh, spec)

  shardings = jax.tree.map(sharding, boxed, is_leaf=is_box)
  return with_shardings(unbox(boxed), shardings)


def with_shardings(tree: Any, shardings: Any) -> Any:
  """A tree as ShapeDtypeStructs with the shardings of another tree."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def is_box(leaf: Any) -> bool:
  """Whether it is a parameter in its box of logical axes."""
  return isinstance(leaf, nn.LogicallyPartitioned)
