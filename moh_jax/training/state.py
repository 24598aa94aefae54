"""The train state: what a checkpoint must hold for an exact continuation."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from moh_jax.training import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything a step reads and writes.

  Attributes:
    step: [] int32 optimizer steps done.
    params: parameter tree, float32.
    opt_state: optax state.
    ema: averaged parameters, or None.
    rng: [2] uint32 data of the run's key; a step folds its number in.
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  ema: Any
  rng: jax.Array


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


def make_state(
  model: nn.Module,
  inputs: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  *,
  seed: int,
  keep_ema: bool,
) -> tuple[Any, Any]:
  """Prepares the state's initialization, sharded over the mesh.

  Args:
    model: the Linen module.
    inputs: abstract positional arguments of the model.
    optimizer: the gradient transformation.
    mesh: the devices.
    seed: of the parameters and of every later random choice.
    keep_ema: whether the state holds averaged parameters.

  Returns:
    A function without arguments that initializes the state in place on the
    devices, and the abstract state (ShapeDtypeStructs with shardings) that a
    checkpoint is restored into.
  """

  def init() -> TrainState:
    rng = jax.random.key(seed)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in inputs]
    params = unbox(init_params(model, jax.random.fold_in(rng, 0), zeros))
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(params),
      ema=jax.tree.map(jnp.copy, params) if keep_ema else None,
      rng=jax.random.key_data(jax.random.fold_in(rng, 1)),
    )

  boxed = abstract_params(model, inputs)
  params = sharding.param_shardings(boxed, mesh)
  whole = sharding.replicated(mesh)
  shardings = TrainState(
    step=whole,
    params=params,
    opt_state=sharding.optimizer_shardings(
      optimizer, unbox(boxed), params, mesh
    ),
    ema=params if keep_ema else None,
    rng=whole,
  )
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(init),
    shardings,
  )
  # It runs once: on the CPU, compiling it fast matters more than running it.
  on_cpu = mesh.devices.flat[0].platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return init, abstract
