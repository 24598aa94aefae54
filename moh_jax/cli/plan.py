"""`python -m moh_jax plan`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.runtime.alive import alive
from moh_jax.runtime.devices import parse_topology

if TYPE_CHECKING:
  from moh_jax.training.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.RunConfig, command.Output):
  """Tell whether a run fits GPUs or TPUs that are not here.

  Attributes:
    topology: GPUs and their number, as h100:16; TPUs and the shape of their
      slice in chips, as v5p:2x4x4, or its name at Google Cloud, as v5p-64.
    no_compile: do not call the compiler for the devices (libtpu, or
      jax-cuda13-plugin), which takes seconds to minutes.
  """

  topology: str
  no_compile: bool = False

  def check(self) -> None:
    """There are such devices."""
    super().check()
    parse_topology(self.topology)


def run(options: Options) -> int:
  """Prints what a run needs on a topology.

  Returns:
    0 if it fits, or may fit where no compiler tells; 1 if it does not.
  """
  import jax

  from moh_jax.training.plan import make_plan

  jax.config.update("jax_platforms", "cpu")  # no device of this machine is used
  topology = parse_topology(options.topology)
  with alive("planning"):
    plan = make_plan(options.loaded, topology, not options.no_compile)
  values = dataclasses.asdict(dataclasses.replace(plan, config=None))
  values["topology"]["devices"] = plan.topology.devices
  values |= {
    "config": config_lib.to_dict(plan.config),
    "fits": plan.fits,
    "accumulation": None if plan.fits else plan.accumulation(),
  }
  options.give(values, _lines(plan))
  return 0 if plan.fits else 1


def _lines(plan: Plan) -> list[str]:
  """The plan for people."""
  config, topology = plan.config, plan.topology
  parts, batch = config.optim.accumulation, config.data.batch_size
  state, examples = sum(plan.state.values()), f"{batch} examples"
  chips = f"{topology.devices} x {topology.chip.kind}, {topology.hosts} host(s)"
  sizes = {**plan.state, "state": state}
  if plan.total is not None:
    sizes["gradients, activations"] = plan.total - state
    sizes["the compiled step"] = plan.total
  memory = {f"memory of a device: {n}": _gb(x) for n, x in sizes.items() if x}
  rows = [
    ("model", f"{config.model.family}, {plan.parameters:,} parameters"),
    *((f"{key}, assumed", value) for key, value in plan.assumed.items()),
    ("topology", f"{topology.slices} x {topology.name}: {chips}"),
    ("mesh", ", ".join(f"{axis}={n}" for axis, n in plan.mesh.items())),
    ("step", f"{examples} in {parts} microbatch(es) of {batch // parts}"),
    ("FLOPs of a step", f"{plan.flops:.4g}"),
    ("FLOPs with every head", f"{plan.baseline_flops:.4g}"),
    *memory.items(),
  ]
  return [_verdict(plan), command.table(rows, ("", ""))]


def _verdict(plan: Plan) -> str:
  """One line: whether a run fits, who says so, and what would fit."""
  word, limit = "fits" if plan.fits else "does not fit", plan.limit / 1e9
  parts = plan.assumed.get("optim.accumulation")
  how = f" with --config.optim.accumulation={parts}" if parts else ""
  if plan.total is None:
    word = "may fit" if plan.fits else word
    state = sum(plan.state.values()) / 1e9
    line = f"{word}{how}: a state of {state:.3g} of {limit:.3g} GB, without "
    return f"{line}activations, which a compiler counts ({plan.compiler})"
  needs = f"{plan.total / 1e9:.3g} of {limit:.3g} GB"
  line = f"{word}{how}: {needs}, compiled by {plan.compiler}"
  if plan.fits:
    return line
  if number := plan.accumulation():
    estimate = f"{plan.estimate(number) / 1e9:.3g} GB"
    return f"{line}; --config.optim.accumulation={number} should ({estimate})"
  return (
    f"{line}; no number of microbatches fits: mesh.fsdp or mesh.tensor split "
    "the state over devices, model.remat keeps fewer activations"
  )


def _gb(size: float) -> str:
  return f"{size / 1e9:,.3f} GB"
