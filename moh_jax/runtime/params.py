"""Parameters of a network: initialised, abstract, and split over a mesh."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from moh_jax.runtime.sharding import (
  RULES,
  axes_of_entry,
  replicated,
  resolve_spec,
)

_SPLITTING_AXES = ("fsdp", "tensor")  # of the mesh, those that split parameters


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
  boxed = abstract_params(model, inputs)
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, unbox(boxed))
  else:
    shardings = param_shardings(boxed, mesh)
  return with_shardings(unbox(boxed), shardings)


def with_shardings(tree: Any, shardings: Any) -> Any:
  """A tree as ShapeDtypeStructs with the shardings of another tree."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def param_shardings(boxed: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Shardings of parameters, from their logical axes.

  Args:
    boxed: abstract parameters in their boxes, see `abstract_params`.
    mesh: the devices.

  Returns:
    Tree of NamedSharding with the structure of the unboxed parameters.
    Parameters without logical axes are replicated.
  """
  sizes = dict(mesh.shape)

  def one(leaf: Any) -> NamedSharding:
    if not _is_box(leaf):
      return replicated(mesh)
    spec = resolve_spec(leaf.names, leaf.value.shape, sizes, RULES)
    return NamedSharding(mesh, spec)

  return jax.tree.map(one, boxed, is_leaf=_is_box)


@dataclasses.dataclass(frozen=True)
class Unsplit:
  """A parameter that some axis does not split.

  Attributes:
    name: its path.
    shape: of the whole parameter.
    bytes: on each device.
    whole: whether no axis splits it.
    why: axes that it has a dimension for and that do not divide it; empty for
      parameters that are whole by design (norms, biases, routers).
  """

  name: str
  shape: tuple[int, ...]
  bytes: int
  whole: bool
  why: str


def unsplit_params(boxed: Any, sizes: Mapping[str, int]) -> list[Unsplit]:
  """Lists what a mesh does not split, the largest first.

  Args:
    boxed: abstract parameters in their boxes, see `abstract_params`.
    sizes: size of every mesh axis.

  Returns:
    Parameters that stay whole, and those that miss an axis. Empty where both
    axes have one device.
  """
  if all(sizes[axis] == 1 for axis in _SPLITTING_AXES):
    return []
  found = []
  for name, shape, itemsize, names, used in _specs(boxed, sizes):
    why = [
      f"{axis}={sizes[axis]} does not divide {logical} {size}"
      for logical, size in zip(names, shape)
      for axis in _mapped(logical)
      if sizes[axis] > 1 and axis not in used
    ]
    if why or not used:
      parts = math.prod(sizes[axis] for axis in used)
      total = math.prod(shape) * itemsize // parts
      found.append(Unsplit(name, shape, total, not used, ", ".join(why)))
  return sorted(found, key=lambda one: -one.bytes)


def check_whole(boxed: Any, sizes: Mapping[str, int], most: int) -> str:
  """Checks that a mesh splits parameters, and says what stays whole.

  Args:
    boxed: abstract parameters in their boxes.
    sizes: size of every mesh axis.
    most: bytes that may stay whole, see `MeshConfig.max_whole`.

  Returns:
    A line for the log, empty if there is nothing to say.

  Raises:
    ValueError: an axis splits no parameter, or more bytes stay whole.
  """
  used = {axis for *_, axes in _specs(boxed, sizes) for axis in axes}
  for axis in _SPLITTING_AXES:
    if sizes[axis] > 1 and axis not in used:
      raise ValueError(
        f"mesh.{axis}={sizes[axis]} divides no dimension of any parameter"
      )
  unsplit = unsplit_params(boxed, sizes)
  if not unsplit:
    return ""
  whole = [one for one in unsplit if one.whole]
  total = sum(one.bytes for one in whole)
  largest = ", ".join(_describe(one) for one in whole[:3])
  if total > most:
    raise ValueError(
      f"mesh.max_whole={most:,} bytes: {total:,} bytes of parameters would be "
      f"whole on every device, the largest are {largest}"
    )
  line = f"{len(whole)} parameters ({total:,} bytes) whole on every device"
  if missed := [one for one in unsplit if one.why]:
    listed = "; ".join(_describe(one) for one in missed[:3])
    line += f"; {len(missed)} not split by an axis, the largest: {listed}"
  return line


def _describe(one: Unsplit) -> str:
  why = f": {one.why}" if one.why else ""
  return f"{one.name} {list(one.shape)}{why}"


def _mapped(logical: str | None) -> list[str]:
  """Mesh axes of parameters that a logical axis is mapped to."""
  axes = axes_of_entry(dict(RULES)[logical]) if logical is not None else ()
  return [axis for axis in axes if axis in _SPLITTING_AXES]


def _specs(boxed: Any, sizes: Mapping[str, int]) -> Iterator[tuple]:
  """Of each parameter name, shape, item size, logical names and axes used."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_box):
    names: tuple[str | None, ...] = ()
    if _is_box(leaf):
      names, leaf = leaf.names, leaf.value
    spec = resolve_spec(names, leaf.shape[: len(names)], dict(sizes), RULES)
    used = {axis for entry in spec for axis in axes_of_entry(entry)}
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    yield name, leaf.shape, leaf.dtype.itemsize, names, used


def _is_box(leaf: Any) -> bool:
  return isinstance(leaf, nn.LogicallyPartitioned)
