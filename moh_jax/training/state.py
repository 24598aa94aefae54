"""The train state: everything that an exact continuation needs."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moh_jax.runtime import sharding
from moh_jax.runtime.fits import HOST_MEMORY, check_host_memory
from moh_jax.runtime.params import (
  abstract_params,
  init_params,
  param_shardings,
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
    ema: averaged parameters in `optim.ema_dtype`, or None.
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
  ema_dtype: str | None,
  optimizer_memory: str = "device",
) -> tuple[Any, Any]:
  """Prepares the initialization of a state that is sharded over a mesh.

  Args:
    model: Linen module.
    inputs: abstract positional arguments of the module.
    optimizer: gradient transformation.
    mesh: the devices.
    seed: seed of the parameters and of all random choices of the run.
    ema_dtype: dtype of the averaged parameters; None keeps none.
    optimizer_memory: of the optimizer's state, see `optim.state_memory`.

  Raises:
    ValueError: the devices lack that memory.

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
      ema=averaged_from(params, ema_dtype),
      rng=jax.random.key_data(jax.random.fold_in(rng, 1)),
    )

  boxed = abstract_params(model, inputs)
  params = param_shardings(boxed, mesh)
  whole = sharding.replicated(mesh)
  opt_state = _optimizer_shardings(
    jax.eval_shape(optimizer.init, unbox(boxed)),
    with_shardings(unbox(boxed), params),
    whole,
  )
  if optimizer_memory == "host":
    check_host_memory("optim.state_memory='host'", mesh)
    opt_state = jax.tree.map(
      lambda s: s.with_memory_kind(HOST_MEMORY), opt_state
    )
  ema = params if ema_dtype else None
  shardings = TrainState(whole, params, opt_state, ema, whole)
  abstract = with_shardings(jax.eval_shape(init), shardings)
  # It runs once, and on CPUs optimizing it takes longer than running it.
  device = mesh.abstract_mesh.abstract_device
  on_cpu = device is not None and device.platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return init, abstract


def averaged_from(params: Any, dtype: str | None) -> Any:
  """Averaged parameters before the first step: a copy; None for None."""
  if dtype is None:
    return None
  return jax.tree.map(lambda x: jnp.array(x, dtype), params)


def _optimizer_shardings(
  opt_state: Any, params: Any, whole: NamedSharding
) -> Any:
  """Shardings of an optimizer's state, from those of the parameters.

  An array at the path of a parameter ("mu/blocks0/mlp/up/kernel") is sharded as
  the parameter if it has its shape, and without the missing dimension if it
  lacks one, as means over rows or columns do. Others are replicated.

  Args:
    opt_state: abstract state.
    params: abstract parameters with shardings.
    whole: sharding of arrays that every device holds.
  """
  paths = dict(jax.tree_util.tree_flatten_with_path(params)[0])

  def one(path: tuple, leaf: Any) -> NamedSharding:
    ends = (path[start:] for start in range(len(path)))
    param = next((paths[end] for end in ends if end in paths), None)
    return whole if param is None else _like(leaf.shape, param) or whole

  return jax.tree_util.tree_map_with_path(one, opt_state)


def _like(shape: tuple[int, ...], param: Any) -> NamedSharding | None:
  """The sharding of an array that follows a parameter, None if none fits."""
  if shape == param.shape:
    return param.sharding
  mesh, spec = param.sharding.mesh, tuple(param.sharding.spec)
  spec += (None,) * (len(param.shape) - len(spec))
  # Of dimensions of one size, the last is the one that Adafactor averages over.
  for axis in reversed(range(len(param.shape))):
    if shape == param.shape[:axis] + param.shape[axis + 1 :]:
      rest = spec[:axis] + spec[axis + 1 :]
      return NamedSharding(mesh, PartitionSpec(*rest))
  return None
