"""Memory, FLOPs and time of a run, estimated without a compiler."""

import dataclasses
import functools
import math

import jax
from jax.sharding import AbstractMesh, AxisType

from moh_jax.config import Config, MeshConfig
from moh_jax.config.layers import without_router
from moh_jax.ops.target import Target
from moh_jax.plan import memory, step_time
from moh_jax.plan.activations import activation_bytes
from moh_jax.plan.memory import Memory
from moh_jax.plan.step_time import StepTime
from moh_jax.runtime import sharding
from moh_jax.runtime.devices import Topology, abstract_device
from moh_jax.training.entrance import check_mesh, check_params
from moh_jax.training.flops import LayerForm, step_flops, step_forms
from moh_jax.training.program import Program, make_program
from moh_jax.training.task import task_builder


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a run needs, by estimate.

  Attributes:
    config: of the run.
    mesh: sizes of the mesh's axes.
    memory: of a device.
    forms: of attention, for each group of equal layers.
    flops: that a step computes, see `StepFlops.computed`.
    time: of a step.
  """

  config: Config
  mesh: dict[str, int]
  memory: Memory
  forms: tuple[LayerForm, ...]
  flops: dict[str, float]
  time: StepTime


class Estimator:
  """Estimates a run on a topology, with different meshes and accumulations."""

  def __init__(self, config: Config, topology: Topology):
    """Counts what no mesh changes.

    Args:
      config: of the run; nothing in it is unset.
      topology: the devices.
    """
    self.topology, self._config = topology, config
    self._check(config)
    self.objective = task_builder(config).make_objective(config)
    self.flops = step_flops(config)
    baseline = without_router(config.model).in_run(config)
    self.baseline_flops = step_flops(baseline).active
    # Tracing a model takes seconds.
    self.activations = functools.cache(self._activation_bytes)
    self._programs = functools.cache(self._program)
    self.parameters = sum(
      leaf.size for leaf in jax.tree.leaves(self.program(config).state.params)
    )

  def estimate(
    self, config: Config, activations: float | None = None
  ) -> Estimate:
    """Estimates a run with its own mesh and accumulation.

    Args:
      config: that of the constructor, but for mesh and accumulation.
      activations: bytes of the activations, where they are known already.

    Raises:
      ValueError: the mesh does not fit the devices, the batch or the heads.
    """
    sizes = dict(self._check(config).shape)
    accumulation = config.optim.accumulation
    if activations is None:
      shards = math.prod(sizes[axis] for axis in sharding.BATCH_AXES)
      examples = config.data.batch_size // (shards * accumulation)
      activations = self.activations(
        examples, sizes["tensor"], sizes["sequence"]
      )
    found = memory.measure(self.program(config), accumulation, activations)
    collectives = step_time.expected_collectives(config, sizes, self.parameters)
    chip = self.topology.chip
    device = Target(chip.platform, chip.kind, chip.cores)
    forms = step_forms(config, sizes, device)
    flops = self.flops.computed(forms)
    time = step_time.predict(config, self.topology, flops, found, collectives)
    return Estimate(config, sizes, found, forms, flops, time)

  def program(self, config: Config) -> Program:
    """The run's program on abstract devices, for its shapes and shardings."""
    return self._programs(config.mesh)

  def _activation_bytes(self, examples: int, *split: int) -> float:
    """Bytes of the activations of a device's part of a microbatch.

    Args:
      examples: in it.
      *split: sizes of the axes `tensor` and `sequence`.
    """
    device = abstract_device(self.topology)
    return activation_bytes(self.objective, device, examples, *split)

  def _program(self, config: MeshConfig) -> Program:
    mesh = self._mesh(config)
    program = make_program(self._config, self.objective, mesh)
    check_params(self._config, mesh, program)
    return program

  def _check(self, config: Config) -> AbstractMesh:
    """The mesh of a run; refuses what it cannot split."""
    mesh = self._mesh(config.mesh)
    check_mesh(config, mesh)
    return mesh

  def _mesh(self, config: MeshConfig) -> AbstractMesh:
    sizes = sharding.axis_sizes(config, self.topology.devices)
    return AbstractMesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(AxisType.Auto,) * len(sizes),
      abstract_device=abstract_device(self.topology),
    )
