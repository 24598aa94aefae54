"""Logical axis names to shardings; modules name axes, never mesh axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class LogicalAxes(nn.LogicallyPartitioned):
  """A parameter boxed with the logical names of its dimensions.

  As Linen's own box, but for NNX (`nnx.bridge.ToNNX`): NNX would shard the
  parameter when it is created, which fails without a mesh. With this box the
  variable keeps the names as its metadata `out_sharding` and is left whole.
  """

  def to_nnx_metadata(self) -> dict[str, Any]:
    """Metadata of the `nnx.Variable` that stands for this parameter."""
    return {
      "value": self.value,
      "out_sharding": self.names,
      "sharding_rules": self.rules,
      "mesh": self.mesh,
      "eager_sharding": False,
    }


def with_axes(
  init: nn.initializers.Initializer, names: Sequence[str | None]
) -> Callable[..., LogicalAxes]:
  """Wraps an initializer so that it boxes its result with logical names.

  Args:
    init: (key, shape, dtype) -> array.
    names: one logical name, or None, per dimension.
  """
  return lambda *args: LogicalAxes(init(*args), tuple(names))


def declare(
  module: nn.Module,
  name: str,
  init: nn.initializers.Initializer,
  shape: Sequence[int],
  axes: Sequence[str | None],
) -> jax.Array:
  """Declares a float32 parameter of a module, with its logical names.

  Args:
    module: the module that owns it.
    name: of the parameter.
    init: (key, shape, dtype) -> array.
    shape: of the parameter.
    axes: one logical name, or None, per dimension.
  """
  return module.param(name, with_axes(init, axes), tuple(shape), jnp.float32)


def resolve_spec(
  names: Sequence[str | None],
  shape: Sequence[int],
  axis_sizes: dict[str, int],
  rules: Sequence[tuple[str, str | tuple[str, ...] | None]],
) -> PartitionSpec:
  """Maps the logical names of an array's dimensions to mesh axes.

  A dimension whose size the mapped mesh axes do not divide (three heads on two
  devices) stays whole on every device. A mesh axis splits one dimension at
  most, the first that is mapped to it.

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
  used: set[str] = set()
  entries: list[tuple[str, ...] | None] = []
  for name, size in zip(names, shape, strict=True):
    if name is not None and name not in table:
      raise ValueError(
        f"logical axis {name!r} has no sharding rule; known: {sorted(table)}"
      )
    mapped = table.get(name) or () if name is not None else ()
    axes = (mapped,) if isinstance(mapped, str) else tuple(mapped)
    free = tuple(a for a in axes if axis_sizes[a] > 1 and a not in used)
    if not free or size % math.prod(axis_sizes[a] for a in free):
      entries.append(None)
    else:
      used.update(free)
      entries.append(free)
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins the sharding of an activation by its logical axes.

  Outside a mesh (`jax.set_mesh`) or without `nn.logical_axis_rules` this is the
  identity, so modules run unchanged on one device.

  Args:
    x: any array.
    *names: one logical name, or None, per dimension.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = nn.get_logical_axis_rules()
  if mesh.empty or mesh.size == 1 or not rules:
    return x
  spec = resolve_spec(names, x.shape, dict(mesh.shape), rules)
  return jax.lax.with_sharding_constraint(x, spec)


def axis_of(name: str, *sizes: int) -> tuple[str, int] | None:
  """The mesh axis that splits dimensions with a logical name.

  Args:
    name: the logical name.
    *sizes: sizes of the dimensions.

  Returns:
    The axis and its number of devices; None outside a mesh, without rules, and
    where no single axis of several devices divides all sizes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = nn.get_logical_axis_rules()
  if mesh.empty or not rules:
    return None
  spec = resolve_spec([name], [math.gcd(*sizes)], dict(mesh.shape), rules)
  axis = spec[0]
  return (axis, mesh.shape[axis]) if isinstance(axis, str) else None


def map_shards(
  function: Callable[..., jax.Array],
  arrays: Sequence[Any],
  names: Sequence[Sequence[str | None]],
  out: Sequence[str | None],
  *,
  whole_mesh: bool = False,
) -> jax.Array:
  """Runs a function on each device's part of the arrays, under shard_map.

  Devices exchange nothing: along the dimensions that the mesh splits, the
  function must do to each part what it does to the whole. Outside a mesh it is
  called directly.

  Args:
    function: (*arrays) -> result.
    arrays: inputs, arrays or trees of them; None is passed on as it is.
    names: for each input, one logical name or None per dimension of all its
      arrays. All dimensions of one name are split over the same mesh axes, or
      none is.
    out: logical names of the result's dimensions.
    whole_mesh: put all mesh axes under manual control, also those that split no
      dimension; else the compiler keeps control of the latter. TPU kernels need
      True.

  Returns:
    The result, split as `out` says.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = nn.get_logical_axis_rules()
  if mesh.empty or mesh.size == 1 or not rules:
    return function(*arrays)
  sizes = dict(mesh.shape)
  # A number of devices divides every dimension of a name if it divides their
  # greatest common divisor.
  common: dict[str, int] = {}
  for tree, axes in zip(arrays, names):
    for array in jax.tree.leaves(tree):
      for size, name in zip(array.shape, axes, strict=True):
        if name is not None:
          common[name] = math.gcd(size, common.get(name, 0))

  def spec(axes: Sequence[str | None]) -> PartitionSpec:
    return resolve_spec(axes, [common.get(n, 1) for n in axes], sizes, rules)

  specs = tuple(spec(axes) for axes in names)
  entries = [entry for s in specs for entry in s if entry]
  used = {a for e in entries for a in ((e,) if isinstance(e, str) else e)}
  if whole_mesh:
    used = set(mesh.axis_names)
  if not used:
    return function(*arrays)
  mapped = jax.shard_map(
    function,
    in_specs=specs,
    out_specs=spec(out),
    axis_names=used,
    # Loops inside start from zeros, which JAX takes to be equal on all devices
    # while what the loops return is not.
    check_vma=False,
  )
  return mapped(*arrays)


def sum_over_batch(
  function: Callable[..., jax.Array],
  split: tuple[jax.Array, ...],
  whole: tuple[jax.Array, ...],
) -> jax.Array:
  """Sums a function over a batch that a mesh splits, with one reduction.

  Each device sums over its own examples, and so do the gradients to `whole`;
  the devices' sums are added once at the end. Left to itself, the compiler adds
  them in every turn of a loop over the tokens.

  Args:
    function: (*split, *whole) -> [] sum over the examples it is given.
    split: arrays with a leading batch axis.
    whole: arrays that every device needs whole, for instance weights.

  Returns:
    [] sum over the whole batch, on one device or a mesh.
  """

  def local(*args: jax.Array) -> jax.Array:
    return function(*args)[None]  # [1], so that parts join to [devices]

  names = [("batch", *[None] * (x.ndim - 1)) for x in split]
  names += [(None,) * x.ndim for x in whole]
  return map_shards(local, (*split, *whole), names, ("batch",)).sum()
