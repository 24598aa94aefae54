"""The plan of a run: whether it fits a topology, how it is split, its time."""

import dataclasses

from moh_jax.config import Config
from moh_jax.data.infer import resolve_without_data
from moh_jax.plan import memory, search, step_time
from moh_jax.plan.compiling import Compiled, compile_step
from moh_jax.plan.estimate import Estimate, Estimator
from moh_jax.plan.memory import Layout
from moh_jax.plan.step_time import StepTime
from moh_jax.runtime.devices import USABLE, Topology, missing_packages

_TRIES = 3  # proposals that are compiled, at most


@dataclasses.dataclass(frozen=True)
class Fitting:
  """A run on a topology with one mesh, and whether it fits.

  Attributes:
    estimate: its memory and, where it was compiled, the time of the compiled
      program's collectives.
    compiled: what the compiler says, or None.
    reason: why it was not compiled, or "".
  """

  estimate: Estimate
  compiled: Compiled | None
  reason: str

  def fits(self, topology: Topology) -> bool:
    """Whether it fits: by the compiler, without one by the estimate."""
    if self.compiled:
      return self.compiled.fits
    return self.estimate.memory.total <= USABLE * topology.chip.memory


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run needs on a topology.

  Attributes:
    config: of the run; nothing is unset.
    topology: the devices.
    assumed: fields of the model that missing data would tell, with the values
      that stand for them.
    parameters: their number.
    layouts: how they are split.
    flops: of a step, for the active heads.
    baseline_flops: of a step of the same model without its router.
    unit: what throughput counts, "images" or "tokens".
    units_per_step: number of them.
    run: with the config's own mesh and accumulation.
    proposal: with others, which fit; None where the run fits or nothing does.
  """

  config: Config
  topology: Topology
  assumed: dict[str, object]
  parameters: int
  layouts: tuple[Layout, ...]
  flops: float
  baseline_flops: float
  unit: str
  units_per_step: int
  run: Fitting
  proposal: Fitting | None

  @property
  def fits(self) -> bool:
    """Whether the run fits as it is."""
    return self.run.fits(self.topology)


def make_plan(config: Config, topology: Topology, compiles: bool) -> Plan:
  """Plans a run; no data and no device are needed.

  Args:
    config: of the run.
    topology: the devices of one of its slices (`mesh.dcn_data`).
    compiles: compile the train step, where the compiler is installed.

  Raises:
    ValueError: the mesh does not fit the devices, the batch or the heads.
  """
  config, assumed = resolve_without_data(config)
  topology = dataclasses.replace(topology, slices=config.mesh.dcn_data)
  estimator = Estimator(config, topology)
  run = _fitting(estimator, estimator.estimate(config), compiles)
  proposal = None
  if not run.fits(topology):
    # Without a compiler a second proposal would be no better.
    tries = _TRIES if run.compiled else 1
    for found in search.proposals(config, estimator)[:tries]:
      # As a plan of the proposal would: the search guesses the activations.
      estimate = estimator.estimate(found.config)
      tried = _fitting(estimator, estimate, run.compiled is not None)
      if tried.fits(topology):
        proposal = tried
        break
  return Plan(
    config=config,
    topology=topology,
    assumed=assumed,
    parameters=estimator.parameters,
    layouts=memory.layouts(estimator.program(config).state.params),
    flops=estimator.flops.active,
    baseline_flops=estimator.baseline_flops,
    unit=estimator.objective.unit,
    units_per_step=estimator.objective.units_per_step,
    run=run,
    proposal=proposal,
  )


def step_time_of(plan: Plan, fitting: Fitting) -> StepTime:
  """The time of a step, by the compiled program's collectives if there are."""
  estimate, compiled = fitting.estimate, fitting.compiled
  if compiled is None or not compiled.fits:
    return estimate.time
  seconds = step_time.communication(compiled.collectives, plan.topology)
  return dataclasses.replace(estimate.time, communication=seconds)


def _fitting(
  estimator: Estimator, estimate: Estimate, compiles: bool
) -> Fitting:
  """Compiles a run, if that is wanted and can be done."""
  topology = estimator.topology
  if not compiles:
    return Fitting(estimate, None, "not asked for")
  if missing := missing_packages(topology.name):
    reason = f"needs the package {', '.join(missing)} in the version of jax"
    return Fitting(estimate, None, reason)
  try:
    return Fitting(estimate, compile_step(estimate.config, topology), "")
  except ValueError as error:
    return Fitting(estimate, None, str(error))
