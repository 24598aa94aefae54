"""Logical axis names to shardings; modules name axes, never mesh axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moh_jax.runtime.sharding import axes_of_entry, resolve_spec


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


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins the sharding of an activation by its logical axes.

  Outside a mesh (`jax.set_mesh`) or without `nn.logical_axis_rules` this is the
  identity, so modules run unchanged on one device.

  Args:
    x: any array.
    *names: one logical name, or None, per dimension.
  """
  mesh = _mesh()
  if math.prod(mesh.values()) == 1:
    return x
  spec = resolve_spec(names, x.shape, mesh, nn.get_logical_axis_rules())
  return jax.lax.with_sharding_constraint(x, spec)


def _mesh() -> dict[str, int]:
  """Devices along each axis; empty outside a mesh and without rules."""
  mesh = jax.sharding.get_abstract_mesh()
  whole = not mesh.empty and nn.get_logical_axis_rules()
  return dict(mesh.shape) if whole else {}


def axes_of(name: str, *sizes: int) -> dict[str, int]:
  """The mesh axes that split dimensions with a logical name.

  Args:
    name: the logical name.
    *sizes: sizes of the dimensions; none is a dimension that any axis divides.

  Returns:
    The axes' numbers of devices, all above 1. Empty outside a mesh and without
    rules.
  """
  if not (mesh := _mesh()):
    return {}
  size, rules = math.gcd(*sizes), nn.get_logical_axis_rules()
  (entry,) = resolve_spec([name], [size], mesh, rules)
  return {axis: mesh[axis] for axis in axes_of_entry(entry)}


def map_shards(
  function: Callable[..., jax.Array],
  arrays: Sequence[Any],
  names: Sequence[Sequence[str | None]],
  out: Sequence[str | None],
  *,
  whole_mesh: bool = False,
  checked: bool = False,
) -> Any:
  """Runs a function on each device's part of the arrays, under shard_map.

  Unless it exchanges data itself (`axes_of` tells along which axes), the
  function must do to each part what it does to the whole. Outside a mesh it is
  called directly.

  Args:
    function: (*arrays) -> result.
    arrays: inputs, arrays or trees of them; None is passed on as it is.
    names: for each input, one logical name or None per dimension of all its
      arrays. All dimensions of one name are split over the same mesh axes, or
      none is.
    out: logical names of the dimensions of each array of the result.
    whole_mesh: put all mesh axes under manual control, also those that split no
      dimension; else the compiler keeps control of the latter. TPU kernels need
      True.
    checked: let JAX find out which values differ between devices, and leave
      out exchanges of gradients that are not needed. It does not understand
      loops that start from zeros.

  Returns:
    The result, split as `out` says.
  """
  mesh, rules = _mesh(), nn.get_logical_axis_rules()
  if math.prod(mesh.values()) == 1:
    return function(*arrays)
  # A number of devices divides every dimension of a name if it divides their
  # greatest common divisor.
  common: dict[str, int] = {}
  for tree, axes in zip(arrays, names):
    for array in jax.tree.leaves(tree):
      for size, name in zip(array.shape, axes, strict=True):
        if name is not None:
          common[name] = math.gcd(size, common.get(name, 0))

  def spec(axes: Sequence[str | None]) -> PartitionSpec:
    return resolve_spec(axes, [common.get(n, 1) for n in axes], mesh, rules)

  specs = tuple(spec(axes) for axes in names)
  used = {a for s in specs for entry in s for a in axes_of_entry(entry)}
  if whole_mesh:
    used = set(mesh)
  if not used:
    return function(*arrays)
  # Loops inside start from zeros, which JAX takes to be equal on all devices
  # while what the loops return is not: `check_vma` would refuse them.
  how = {"axis_names": used, "check_vma": checked}
  mapped = jax.shard_map(function, in_specs=specs, out_specs=spec(out), **how)
  return mapped(*arrays)
