"""Parameters of a network: initialised, or as shapes to restore into."""

from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from moh_jax.runtime import sharding


def init_params(model: nn.Module, rng: jax.Array, inputs: Any) -> Any:
  """Initial parameters, still boxed with their logical axes.

  Initialization runs without sharding rules: Linen would otherwise constrain
  each parameter as it unboxes it, where indivisible dimensions fail. The
  shardings come from the jitted initialization's `out_shardings` instead.
  """
  with nn.logical_axis_rules(()):
    return model.init(rng, *inputs)["params"]


def unbox(boxed: Any) -> Any:
  """Parameters without their logical axes."""
  with nn.logical_axis_rules(()):
    return nn.unbox(boxed)


def abstract_params(model: nn.Module, inputs: Any) -> Any:
  """Boxed parameters as ShapeDtypeStructs, without computing anything.

  Args:
    model: the Linen module.
    inputs: its positional arguments, abstract or not.
  """
  key = jax.random.key(0)
  return jax.eval_shape(lambda *args: init_params(model, key, args), *inputs)


def abstract_on(model: nn.Module, inputs: Any, mesh: Mesh | None) -> Any:
  """Parameters as ShapeDtypeStructs with shardings, to restore into.

  Args:
    model: the Linen module.
    inputs: its abstract positional arguments.
    mesh: the devices; None is one device.
  """
  boxed = abstract_params(model, inputs)
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, unbox(boxed))
  else:
    shardings = sharding.param_shardings(boxed, mesh)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    unbox(boxed),
    shardings,
  )
