"""The train state: what a checkpoint must hold for an exact continuation."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from moh_jax.runtime import sharding
from moh_jax.runtime.params import abstract_params, init_params, unbox


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
    opt_state=optimizer_shardings(optimizer, unbox(boxed), params, mesh),
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


def optimizer_shardings(
  optimizer: optax.GradientTransformation,
  abstract_params: Any,
  shardings: Any,
  mesh: Mesh,
) -> Any:
  """Shardings of the optimizer state: moments follow their parameters."""
  state = jax.eval_shape(optimizer.init, abstract_params)
  return optax.tree.map_params(
    optimizer,
    lambda _, placed: placed,
    state,
    shardings,
    transform_non_params=lambda _: sharding.replicated(mesh),
  )
