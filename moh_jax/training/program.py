"""The programs of a run: initialization and the train step."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moh_jax.config import Config
from moh_jax.ops.head_placement import check_heads, check_tokens
from moh_jax.runtime import sharding
from moh_jax.runtime.fits import check_config, check_host_memory, check_tree
from moh_jax.runtime.params import abstract_params, check_whole
from moh_jax.training import layer_decay, optim
from moh_jax.training.state import TrainState, make_state
from moh_jax.training.step import jit_train_step
from moh_jax.training.task import Objective

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
  """The jitted functions of a run, and what they take.

  Attributes:
    init: () -> initial state.
    state: abstract, with shardings.
    batch: abstract global batch, with shardings.
    step: (state, batch) -> (state, metrics).
  """

  init: Callable[[], TrainState]
  state: TrainState
  batch: Any
  step: Callable


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

  Raises:
    ValueError: the mesh does not split the parameters, or its devices cannot
      use the memory of their host as the config asks.
  """
  if config.model.remat == "offload":
    check_host_memory("model.remat='offload'", mesh)
  boxed = abstract_params(objective.model, objective.inputs)
  if line := check_whole(boxed, mesh.shape, config.mesh.max_whole):
    _LOG.info("mesh: %s", line)
  optimizer = optim.make_optimizer(config.optim, config.train.steps, boxed)
  optimizer = layer_decay.scale(
    optimizer, config.optim.layer_decay, config.model
  )
  init, state = make_state(
    objective.model,
    objective.inputs,
    optimizer,
    mesh,
    seed=config.train.seed,
    ema_dtype=config.optim.ema_dtype if config.optim.ema_decay else None,
    optimizer_memory=config.optim.state_memory,
  )
  split = NamedSharding(mesh, PartitionSpec(sharding.BATCH_AXES))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (config.data.batch_size, *x.shape), x.dtype, sharding=split
    ),
    objective.example,
  )
  step = jit_train_step(
    state_shardings=jax.tree.map(lambda x: x.sharding, state),
    loss_fn=objective.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(config.optim, config.train.steps),
    accumulation=config.optim.accumulation,
    ema_decay=config.optim.ema_decay,
    ema_every=config.optim.ema_every,
  )
  return Program(init, state, batch, step)


def check_split(config: Config, mesh: Mesh | AbstractMesh) -> None:
  """Refuses a run that cannot be trained on a mesh.

  All that follows from the config and the mesh alone, for training and `plan`.

  Args:
    config: of the run.
    mesh: the devices.

  Raises:
    ValueError: the mesh does not fit the batches, the heads or the tokens, or
      leaves a device of several slices a single image where images are mixed;
      or the config is one for serving.
  """
  if config.model.router.top_p:
    raise ValueError(
      f"model.router.top_p={config.model.router.top_p} must be 0 in training: "
      "it serves a trained model"
    )
  batch, parts = config.data.batch_size, config.optim.accumulation
  sharding.check_batch("data.batch_size", batch, mesh, parts)
  sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
  check_heads(config.model, mesh, config.mesh.max_imbalance)
  length = getattr(config.data, "sequence_length", None)
  check_tokens(config.model, mesh, length)
  each = batch // (sharding.batch_shards(mesh) * parts)
  classifier = config.sections.get("classifier")
  if classifier and classifier.mixes and config.mesh.dcn_data > 1 and each < 2:
    raise ValueError(
      f"data.batch_size={batch} must leave two images or more on each device, "
      f"where it is {each}: with mesh.dcn_data={config.mesh.dcn_data}, "
      f"classifier.mixup={classifier.mixup} and classifier.cutmix="
      f"{classifier.cutmix} mix the images of a device"
    )


def check_memory(config: Config, program: Program, mesh: Mesh) -> None:
  """Refuses a run that the memory of its devices cannot hold.

  Args:
    config: of the run.
    program: of the run.
    mesh: its devices, which are here.

  Raises:
    ValueError: names what is too large.
  """
  check_config(config, mesh)
  check_tree(program.state, "the state of the run (parameters and optimizer)")


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
