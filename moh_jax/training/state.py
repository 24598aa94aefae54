"""The train state: everything that an exact continuation needs."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from moh_jax.runtime import sharding
from moh_jax.runtime.params import (
  abstract_params,
  init_params,
  unbox,
  with_shardings,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a train step reads and writes.

  Attributes:
    step: [] int32, number of optimizer steps done.
    params: parameter tree, float32.
    opt_state: state of the optax optimizer.
    ema: averaged parameters, or None.
    rng: [2] uint32, data of the run's random key; a step folds its number in.
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
  mesh: Mesh | AbstractMesh,
  *,
  seed: int,
  keep_ema: bool,
) -> tuple[Any, Any]:
  """Prepares the initialization of a state that is sharded over a mesh.

  Args:
    model: Linen module.
    inputs: abstract positional arguments of the module.
    optimizer: gradient transformation.
    mesh: the devices.
    seed: seed of the parameters and of all random choices of the run.
    keep_ema: whether the state holds averaged parameters.

  Returns:
    A jitted function () -> initial state, which each device initialises its
    part of, and the abstract state (ShapeDtypeStructs with shardings) to
    restore a checkpoint into.
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
  opt_state = optax.tree.map_params(  # moments are sharded like parameters
    optimizer,
    lambda _, param_sharding: param_sharding,
    jax.eval_shape(optimizer.init, unbox(boxed)),
    params,
    transform_non_params=lambda _: whole,
  )
  ema = params if keep_ema else None
  shardings = TrainState(whole, params, opt_state, ema, whole)
  abstract = with_shardings(jax.eval_shape(init), shardings)
  # It runs once, and on CPUs optimizing it takes longer than running it.
  device = mesh.abstract_mesh.abstract_device
  on_cpu = device is not None and device.platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return init, abstract
