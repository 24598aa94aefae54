"""The programs of a run: its initialization and its train step."""

import logging
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.runtime.fits import check_config, check_tree
from moh_jax.runtime.params import abstract_params
from moh_jax.runtime.whole_params import check_whole
from moh_jax.training import optim
from moh_jax.training.state import TrainState, make_state
from moh_jax.training.step import jit_train_step
from moh_jax.training.task import Task

_LOG = logging.getLogger(__name__)


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
    ValueError: memory cannot hold the run, or the mesh does not split its
      parameters.
  """
  check_config(config, mesh)
  boxed = abstract_params(task.model, task.inputs)
  if line := check_whole(boxed, mesh.shape, config.mesh.max_whole):
    _LOG.info("mesh: %s", line)
  optimizer = optim.make_optimizer(config.optim, config.train.steps)
  init_state, abstract = make_state(
    task.model,
    task.inputs,
    optimizer,
    mesh,
    seed=config.train.seed,
    keep_ema=config.optim.ema_decay > 0,
  )
  check_tree(abstract, "the state of the run (parameters and optimizer)")
  step = jit_train_step(
    state_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    loss_fn=task.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(config.optim, config.train.steps),
    accumulation=config.optim.accumulation,
    ema_decay=config.optim.ema_decay,
  )
  return init_state, abstract, step
