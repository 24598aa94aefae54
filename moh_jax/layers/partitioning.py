"""Logical axis names to shardings; modules name axes, never mesh axes."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec


def resolve_spec(
  names: Sequence[str | None],
  shape: Sequence[int],
  axis_sizes: dict[str, int],
  rules: Sequence[tuple[str, str | tuple[str, ...] | None]],
) -> PartitionSpec:
  """Maps logical axis names to mesh axes, dimension by dimension.

  A dimension that the mapped mesh axes do not divide (three heads on two
  devices) stays whole on every device, and a mesh axis is used once.

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
