"""The programs of a run: initialization and the train step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moh_jax.config import Config
from moh_jax.runtime.sharding import (
  BATCH_AXES,
  HOST_MEMORY,
  abstract_params,
  init_params,
  param_shardings,
  unbox,
  with_shardings,
)
from moh_jax.training import optim
from moh_jax.training.step import TrainState, jit_train_step
from moh_jax.training.task import Objective


@dataclasses.dataclass(frozen=True)
class Program:
  """The jitted functions of a run, and what they take.

  Attributes:
    init: () -> initial state, of which each device initialises its part.
    state: abstract, with shardings, to restore a checkpoint into.
    batch: abstract global batch, with shardings.
    step: (state, batch) -> (state, metrics).
    boxed: abstract parameters in their boxes of logical axes.
  """

  init: Callable[[], TrainState]
  state: TrainState
  batch: Any
  step: Callable
  boxed: Any


def make_program(
  config: Config, objective: Objective, mesh: Mesh | AbstractMesh
) -> Program:
  """Builds the functions of a run; nothing is computed and no data are read.

  Training and `plan` both take their step from here.

  Args:
    config: config of the run.
    objective: its network and loss; a `Task` is one.
    mesh: the devices; they may be absent, or abstract. What is abstract cannot
      be compiled for, but its shardings are known.
  """
  section, steps = config.optim, config.train.steps
  boxed = abstract_params(objective.model, objective.inputs)
  plain = unbox(boxed)
  params = with_shardings(plain, param_shardings(boxed, mesh))
  optimizer = optim.decay_by_layer(
    optim.make_optimizer(section, steps, boxed),
    section.layer_decay,
    config.model,
  )
  opt_state = jax.eval_shape(optimizer.init, plain)
  shardings = _state_shardings(config, params, opt_state, mesh)
  step = jit_train_step(
    state_shardings=shardings,
    loss_fn=objective.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(section, steps),
    accumulation=section.accumulation,
    ema_decay=section.ema_decay,
    ema_every=section.ema_every,
  )
  split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (config.data.batch_size, *x.shape), x.dtype, sharding=split
    ),
    objective.example,
  )

  def init() -> TrainState:
    rng = jax.random.key(config.train.seed)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in objective.inputs]
    key = jax.random.fold_in(rng, 0)
    params = unbox(init_params(objective.model, key, zeros))
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(params),
      ema=averaged_from(params, config),
      rng=jax.random.key_data(jax.random.fold_in(rng, 1)),
    )

  state = with_shardings(jax.eval_shape(init), shardings)
  # It runs once, and on CPUs optimizing it takes longer than running it.
  device = mesh.abstract_mesh.abstract_device
  on_cpu = device is not None and device.platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return Program(init, state, batch, step, boxed)


def averaged_from(params: Any, config: Config) -> Any:
  """Averaged parameters before the first step: a copy, or None."""
  if not config.optim.ema_decay:
    return None
  return jax.tree.map(lambda x: jnp.array(x, config.optim.ema_dtype), params)


def describe(config: Config, params: Any) -> str:
  """The family, the sizes and the number of parameters of a model."""
  groups = config.model.layer_groups()
  widths = dict.fromkeys(group.width for group in groups)
  return (
    f"{config.model.family}, {sum(group.depth for group in groups)} layers of "
    f"width {', '.join(map(str, widths))}, "
    f"{config.model.activated_share:.1%} of the heads active, "
    f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"
  )


def _state_shardings(
  config: Config,
  params: Any,
  opt_state: Any,
  mesh: Mesh | AbstractMesh,
) -> TrainState:
  """Shardings of an abstract state, whose parameters have theirs."""
  whole = NamedSharding(mesh, PartitionSpec())
  opt_state = _optimizer_shardings(opt_state, params, whole)
  if config.optim.state_memory == "host":
    opt_state = jax.tree.map(
      lambda s: s.with_memory_kind(HOST_MEMORY), opt_state
    )
  params = jax.tree.map(lambda x: x.sharding, params)
  ema = params if config.optim.ema_decay else None
  return TrainState(whole, params, opt_state, ema, whole)


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
