"""`python -m moh_jax plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moh_jax import config as config_lib
from moh_jax.cli import command
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


def _lines(plan: Plan) -> Iterator[str]:
  """The plan for people."""
  config, topology, chip = plan.config, plan.topology, plan.topology.chip
  yield f"{_verdict(plan)}\n"
  rank = config.tune.lora.rank
  tuned = f" (adapters of rank {rank} are trained)" if rank else ""
  yield (
    f"model: {config.model.family}, {plan.parameters:,} parameters{tuned}, "
    f"{config.model.activated_share:.1%} of the heads active"
  )
  for name, value in plan.assumed.items():
    yield f"assumed, since the data are not here: model.{name}={value}"
  slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
  yield (
    f"topology: {slices}{topology.name}, {topology.devices} x {chip.kind} on "
    f"{topology.hosts} host(s), {_gb(chip.memory)} each"
  )
  parts, batch = config.optim.accumulation, config.data.batch_size
  yield (
    f"mesh: {', '.join(f'{axis}={n}' for axis, n in plan.mesh.items())}; "
    f"{batch} examples a step in {parts} microbatch(es) of {batch // parts}"
  )
  yield (
    f"FLOPs of a step: {plan.flops:.4g} for the active heads, "
    f"{plan.baseline_flops:.4g} with every head (multi-head attention)\n"
  )
  rows = [(name, _gb(size)) for name, size in plan.state.items() if size]
  state = sum(plan.state.values())
  rows.append(("state", _gb(state)))
  if plan.total is not None:
    rows.append(("gradients, activations", _gb(plan.total - state)))
    rows.append(("the compiled step", _gb(plan.total)))
  yield command.table(rows, ("memory of a device", ""))


def _verdict(plan: Plan) -> str:
  """One line: whether a run fits, who says so, and what would fit."""
  word, limit = "fits" if plan.fits else "does not fit", _gb(plan.limit)
  if plan.total is None:
    word = "may fit" if plan.fits else word
    state = _gb(sum(plan.state.values()))
    line = f"{word}: state of {state} of {limit}, and a compiler tells the rest"
    return f"{line} ({plan.compiler})"
  line = f"{word}: {_gb(plan.total)} of {limit}, compiled by {plan.compiler}"
  if plan.fits:
    return line
  if number := plan.accumulation():
    return f"{line}; --config.optim.accumulation={number} should fit"
  return (
    f"{line}; no number of microbatches fits: mesh.fsdp or mesh.tensor split "
    "the state over devices, model.remat keeps fewer activations"
  )


def _gb(size: float) -> str:
  return f"{size / 1e9:,.3f} GB"
