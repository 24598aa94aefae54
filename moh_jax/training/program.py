"""The programs of a run, initialization and train step, and what they train."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.runtime.fits import check_config, check_host_memory, check_tree
from moh_jax.runtime.params import abstract_params
from moh_jax.training import optim
from moh_jax.training.state import TrainState, make_state
from moh_jax.training.step import jit_train_step
from moh_jax.training.task import Task


def make_program(
  config: Config, task: Task, mesh: Mesh
) -> tuple[Callable[[], TrainState], TrainState, Callable]:
  """Builds the jitted functions of a run; nothing is computed yet.

  Args:
    config: config of the run.
    task: its task.
    mesh: the devices.

  Returns:
    The function () -> initial state, the abstract state (ShapeDtypeStructs with
    shardings), and the function (state, batch) -> (state, metrics).

  Raises:
    ValueError: memory cannot hold the run, or the devices cannot use the
      memory of their host as the config asks.
  """
  check_config(config, mesh)
  if config.model.remat == "offload":
    check_host_memory("model.remat='offload'", mesh)
  optimizer = optim.make_optimizer(
    config.optim,
    config.train.steps,
    abstract_params(task.model, task.inputs),
  )
  init_state, abstract = make_state(
    task.model,
    task.inputs,
    optimizer,
    mesh,
    seed=config.train.seed,
    ema_dtype=config.optim.ema_dtype if config.optim.ema_decay else None,
    optimizer_memory=config.optim.state_memory,
  )
  check_tree(abstract, "the state of the run (parameters and optimizer)")
  step = jit_train_step(
    state_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    loss_fn=task.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(config.optim, config.train.steps),
    accumulation=config.optim.accumulation,
    ema_decay=config.optim.ema_decay,
    ema_every=config.optim.ema_every,
  )
  return init_state, abstract, step


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
