"""Parameters of a network: initialised, or abstract to restore into."""

from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from moh_jax.runtime import sharding


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
    shardings = sharding.param_shardings(boxed, mesh)
  return with_shardings(unbox(boxed), shardings)


def with_shardings(tree: Any, shardings: Any) -> Any:
  """A tree as ShapeDtypeStructs with the shardings of another tree."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )
