"""The plan of a run: whether it fits GPUs or TPUs that are not here."""

import dataclasses
import importlib.metadata
import math
import re
from typing import Any

import jax

from moh_jax.config import Config, apply_overrides, without_router
from moh_jax.data.infer import resolve_without_data
from moh_jax.models.adapters import count, join
from moh_jax.runtime.devices import USABLE, Topology, absent_devices
from moh_jax.runtime.mesh import (
  BATCH_AXES,
  axis_sizes,
  fitting_parts,
  make_mesh,
  use_mesh,
)
from moh_jax.runtime.parameters import bytes_on_device
from moh_jax.training.entrance import check_run
from moh_jax.training.flops import step_flops
from moh_jax.training.step import Program, make_program
from moh_jax.training.task import task_builder

_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}
# How compilers say that a program does not fit, with the bytes that it needs.
_NEEDS = re.compile(r"(?:Used |\()([\d.]+)([KMGT]?) ?(?:of|\) exceeds)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run needs on a topology.

  Attributes:
    config: of the run; nothing is unset.
    topology: the devices.
    assumed: keys that missing data would tell, with the values that stand for
      them; and "optim.accumulation", where that of the config does not split
      the batch over the devices.
    mesh: sizes of the mesh's axes.
    parameters: their number.
    state: bytes on one device by what holds them, exact by shapes and
      shardings: "parameters" that are trained, "frozen" ones, "optimizer",
      "ema", and the "batch" of a step.
    flops: of a step, for the active heads.
    baseline_flops: of a step of the same model without its router.
    compiler: its name and version, or why the step was not compiled.
    total: bytes that the compiled step needs; None where it was not compiled.
  """

  config: Config
  topology: Topology
  assumed: dict[str, Any]
  mesh: dict[str, int]
  parameters: int
  state: dict[str, int]
  flops: float
  baseline_flops: float
  compiler: str
  total: float | None = None

  @property
  def limit(self) -> float:
    """Bytes of a device that a step may have."""
    return USABLE * self.topology.chip.memory

  @property
  def fits(self) -> bool:
    """Whether the compiled step fits; without a compiler, whether its state."""
    return (self.total or sum(self.state.values())) <= self.limit

  def accumulation(self) -> int | None:
    """The fewest microbatches that should fit a step which does not.

    None where no number fits, or nothing was compiled.
    """
    batch, parts = self.config.data.batch_size, self.config.optim.accumulation
    shards = math.prod(self.mesh[axis] for axis in BATCH_AXES)
    for number in range(parts + 1, batch // shards + 1):
      is_whole = batch % (shards * number) == 0
      if is_whole and self.estimate(number) <= self.limit:
        return number
    return None

  def estimate(self, parts: int) -> float:
    """Bytes that the step should need with other microbatches.

    What is neither the state nor gradients grows with the microbatch.

    Args:
      parts: their number.
    """
    config = self.config
    whole = self.mesh["fsdp"] if config.mesh.gather == "step" else 1
    # The gradients of a microbatch, and their sum.
    fixed = sum(self.state.values()) + 2 * whole * self.state["parameters"]
    grows = (self.total or math.inf) - fixed
    return fixed + grows * config.optim.accumulation / parts


def make_plan(config: Config, topology: Topology, compiles: bool) -> Plan:
  """Plans a run; no data and no device are needed.

  Args:
    config: of the run.
    topology: the devices of one of its slices (`mesh.dcn_data`).
    compiles: compile the train step, where the compiler is installed.

  Raises:
    ValueError: the mesh does not fit the devices, the batch or the heads.
  """
  config, told = resolve_without_data(config)
  assumed = {f"model.{name}": value for name, value in told.items()}
  topology = dataclasses.replace(topology, slices=config.mesh.dcn_data)
  mesh = _abstract_mesh(config, topology)
  compiler = "not asked for"
  if compiles:
    package = _COMPILERS[topology.chip.platform]
    try:
      devices = absent_devices(topology.name, topology.slices)
      mesh = make_mesh(config.mesh, devices)
      compiler = f"{package} {importlib.metadata.version(package)}"
    except ValueError as error:
      compiles, compiler = False, str(error)
  batch, parts = config.data.batch_size, config.optim.accumulation
  fitting = fitting_parts(batch, mesh, parts) or parts
  if fitting != parts:
    assumed["optim.accumulation"] = fitting
    config = apply_overrides(config, "optim", accumulation=fitting)
  objective = task_builder(config).make_objective(config)
  program = make_program(config, objective, mesh)
  check_run(config, mesh, program, evaluates=False)
  state = program.state
  held = {
    "parameters": state.params,
    "frozen": program.frozen,
    "optimizer": (state.opt_state, state.step, state.rng),
    "ema": state.ema,
    "batch": program.batch,
  }
  baseline = dataclasses.replace(config, model=without_router(config.model))
  plan = Plan(
    config=config,
    topology=topology,
    assumed=assumed,
    mesh=dict(mesh.shape),
    parameters=count(join(program.frozen, state.params)),
    state={name: bytes_on_device(tree) for name, tree in held.items()},
    flops=step_flops(config),
    baseline_flops=step_flops(baseline),
    compiler=compiler,
  )
  return _compiled(plan, program, mesh) if compiles else plan


def _abstract_mesh(
  config: Config, topology: Topology
) -> jax.sharding.AbstractMesh:
  """A mesh of devices that no compiler knows."""
  sizes = axis_sizes(config.mesh, topology.devices)
  chip, kinds = topology.chip, (jax.sharding.AxisType.Auto,) * len(sizes)
  device = jax.sharding.AbstractDevice(
    device_kind=chip.kind, num_cores=chip.cores, platform=chip.platform
  )
  return jax.sharding.AbstractMesh(
    (*sizes.values(),), (*sizes,), kinds, abstract_device=device
  )


def _compiled(plan: Plan, program: Program, mesh: jax.sharding.Mesh) -> Plan:
  """The plan with what the compiler says of the step."""
  options = {}
  if plan.topology.chip.platform == "gpu":
    options["xla_gpu_autotune_level"] = 0  # it would run kernels
  try:
    with use_mesh(mesh):
      inputs = program.state, program.batch, program.frozen
      total = used_bytes(program.step.lower(*inputs).compile(options))
  except jax.errors.JaxRuntimeError as error:
    text = " ".join(str(error).split())
    needs = _NEEDS.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not needs:
      text = f"{plan.compiler}: {text[:300]}"
      return dataclasses.replace(plan, compiler=text)
    total = float(needs[1]) * _UNITS[needs[2]]
  return dataclasses.replace(plan, total=total)


def used_bytes(compiled: Any) -> int:
  """Bytes of a device that a compiled program needs."""
  memory = compiled.memory_analysis()
  outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
  arguments, others = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  return arguments + outputs + others
