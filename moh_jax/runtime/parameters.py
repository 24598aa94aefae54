"""Parameters on a mesh: initialised, abstract, and with their shardings."""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from moh_jax.runtime.mesh import RULES, replicated, resolve_spec


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


def is_box(leaf: Any) -> bool:
  """Whether it is a parameter in its box of logical axes."""
  return isinstance(leaf, nn.LogicallyPartitioned)


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


def bytes_on_device(tree: Any) -> int:
  """Bytes of one device's parts of ShapeDtypeStructs with shardings."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


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
