"""Logical axis names to shardings; modules name axes, never mesh axes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.flatten_util
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, reshard

from moh_jax.runtime.mesh import axes_of_entry, resolve_spec


class LogicalAxes(nn.LogicallyPartitioned):
  """A parameter boxed with the logical names of its dimensions.

  As Linen's own box, but for NNX (`nnx.bridge.ToNNX`): NNX would shard the
  parameter when it is created, which fails without a mesh. With this box the
  variable keeps the names as its metadata `out_sharding` and is left whole.

  Attributes:
    dtype: to which its layer rounds the parameter before any use; None if it
      does not.
    inputs: of the kernel of a layer that can have an adapter, how many of its
      dimensions are the input's; None of other parameters.
  """

  dtype: Any = flax.struct.field(default=None, pytree_node=False)
  inputs: int | None = flax.struct.field(default=None, pytree_node=False)

  def add_axis(self, index: int, params: dict[Any, Any]) -> "LogicalAxes":
    """Adds the axis of `nn.scan` or `nn.vmap`, which need not name it."""
    return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

  def remove_axis(self, index: int, params: dict[Any, Any]) -> "LogicalAxes":
    """Removes such an axis."""
    return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})

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
  init: nn.initializers.Initializer,
  names: Sequence[str | None],
  dtype: jnp.dtype | None = None,
  inputs: int | None = None,
) -> Callable[..., LogicalAxes]:
  """Wraps an initializer so that it boxes its result with logical names.

  Args:
    init: (key, shape, dtype) -> array.
    names: one logical name, or None, per dimension.
    dtype: see `LogicalAxes`.
    inputs: see `LogicalAxes`.
  """
  more = {"dtype": dtype, "inputs": inputs}
  return lambda *args: LogicalAxes(init(*args), tuple(names), **more)


def declare(
  module: nn.Module,
  name: str,
  init: nn.initializers.Initializer,
  shape: Sequence[int],
  axes: Sequence[str | None],
  dtype: jnp.dtype | None = None,
  inputs: int | None = None,
  param_dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
  """Declares a parameter of a module, with its logical names.

  Args:
    module: the module that owns it.
    name: of the parameter.
    init: (key, shape, dtype) -> array.
    shape: of the parameter.
    axes: one logical name, or None, per dimension.
    dtype: see `LogicalAxes`.
    inputs: see `LogicalAxes`.
    param_dtype: of the parameter.
  """
  boxed = with_axes(init, axes, dtype, inputs)
  return gather(module.param(name, boxed, tuple(shape), param_dtype))


def gather(x: jax.Array, kept: int = 0) -> jax.Array:
  """Gathers an array along Explicit mesh axes, but for its first dimensions.

  There the split is part of an array's type, and few operations take any.
  """
  own = jax.typeof(x).sharding
  if not any(own.spec[kept:]):
    return x
  return reshard(x, NamedSharding(own.mesh, PartitionSpec(*own.spec[:kept])))


def split_batch_alone(tree: Any) -> Any:
  """Gathers what Explicit axes split, but for the first dimension."""
  return jax.tree.map(functools.partial(gather, kept=1), tree)


def split_alike(x: jax.Array, like: jax.Array) -> jax.Array:
  """Splits an array as another one is, along Explicit axes of a mesh."""
  own = jax.typeof(like).sharding
  return reshard(x, own) if any(own.spec) else x


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
  """Devices along each axis; empty outside a mesh and without rules.

  Under `jax.shard_map` arrays are a device's own parts along some axes, which
  have one device here.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not nn.get_logical_axis_rules():
    return {}
  own = mesh.manual_axes
  return {axis: 1 if axis in own else n for axis, n in mesh.shape.items()}


def _example_axes() -> tuple[str, ...]:
  """Axes of the batch along which a step's devices have their own examples."""
  mesh, rules = jax.sharding.get_abstract_mesh(), nn.get_logical_axis_rules()
  axes = axes_of_entry(dict(rules).get("batch"))
  return tuple(axis for axis in axes if axis in mesh.manual_axes)


def sum_examples(tree: Any) -> Any:
  """Adds up sums over the examples of a batch, of which devices have parts.

  In a training step a device sees only its own examples (`training.step`);
  everywhere else arrays are those of all, and this is the identity. The
  gradient is that of a mean over devices, each of which differentiates the
  same value.

  Args:
    tree: float32 arrays, exchanged as one.
  """
  axes = _example_axes()
  if not axes:
    return tree
  flat, restore = jax.flatten_util.ravel_pytree(tree)
  fixed = jax.lax.stop_gradient(flat)
  # Every device has the same cotangent, so that none is exchanged.
  passed = jax.lax.axis_size(axes) * (flat - fixed)
  return restore(jax.lax.psum(fixed, axes) + passed)


def draw_examples(
  draw: Callable[..., jax.Array], key: jax.Array, shape: Sequence[int]
) -> jax.Array:
  """Random values of the examples [B, ...], whatever devices have them.

  Each example has a key of its own, so that a device samples only the values of
  those that it has.

  Args:
    draw: (key, shape=) -> random values of one example.
    key: of all examples.
    shape: of the examples that are here.
  """
  axes, index = _example_axes(), jnp.arange(shape[0])
  if axes:
    index += jax.lax.axis_index(axes) * shape[0]
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(index)
  return jax.vmap(functools.partial(draw, shape=tuple(shape[1:])))(keys)


def drop_elements(module: nn.Module, x: jax.Array, rate: float) -> jax.Array:
  """Sets a share of the elements of x [B, ...] to 0, and scales the others."""
  keep = 1 - rate
  draw = functools.partial(jax.random.bernoulli, p=keep)
  kept = draw_examples(draw, module.make_rng("dropout"), x.shape)
  return jnp.where(kept, x / keep, 0)


def examples_key(key: jax.Array) -> jax.Array:
  """Another key for each device that has other examples of the batch."""
  axes = _example_axes()
  return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def reverse_examples(x: jax.Array) -> jax.Array:
  """The examples of a batch [B, ...] in reverse order, also of all devices."""
  axes = _example_axes()
  if not axes:
    return x[::-1]
  last = jax.lax.axis_size(axes) - 1
  pairs = [(device, last - device) for device in range(last + 1)]
  return jax.lax.ppermute(x[::-1], axes, pairs)


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
    used = set(mesh) - set(jax.sharding.get_abstract_mesh().manual_axes)
  if not used:
    return function(*arrays)
  # Loops inside start from zeros, which JAX takes to be equal on all devices
  # while what the loops return is not: `check_vma` would refuse them.
  how = {"axis_names": used, "check_vma": checked}
  mapped = jax.shard_map(function, in_specs=specs, out_specs=spec(out), **how)
  return mapped(*arrays)
