"""Parameters that the axes fsdp and tensor of a mesh leave whole.

An axis splits a dimension only if it divides its size. What it does not split,
every device along it holds and computes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from moh_jax.layers.partitioning import resolve_spec
from moh_jax.runtime.sharding import RULES

_AXES = ("fsdp", "tensor")


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
    boxed: abstract parameters in their boxes, see `params.abstract_params`.
    sizes: size of every mesh axis.

  Returns:
    Parameters that stay whole, and those that miss an axis. Empty where both
    axes have one device.
  """
  if all(sizes[axis] == 1 for axis in _AXES):
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
  for axis in _AXES:
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


def _mapped(logical: str | None) -> Sequence[str]:
  """Mesh axes of parameters that a logical axis is mapped to."""
  axes = dict(RULES)[logical] if logical is not None else None
  axes = (axes,) if isinstance(axes, str) else axes or ()
  return [axis for axis in axes if axis in _AXES]


def _specs(boxed: Any, sizes: Mapping[str, int]) -> list[tuple]:
  """Of each parameter name, shape, item size, logical names and axes used."""
  leaves = jax.tree_util.tree_flatten_with_path(
    boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )[0]
  rows = []
  for path, leaf in leaves:
    names: tuple[str | None, ...] = ()
    if isinstance(leaf, nn.LogicallyPartitioned):
      names, leaf = leaf.names, leaf.value
    spec = resolve_spec(names, leaf.shape[: len(names)], dict(sizes), RULES)
    entries = [e for e in spec if e is not None]
    used = {a for e in entries for a in ((e,) if isinstance(e, str) else e)}
    name = "/".join(str(key.key) for key in path)
    rows.append((name, leaf.shape, leaf.dtype.itemsize, names, used))
  return rows
