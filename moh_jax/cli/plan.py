"""`python -m moh_jax plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.runtime.devices import parse_topology

if TYPE_CHECKING:
  from moh_jax.training.plan import Plan

_SMALL = 1e-3  # of the parameters' bytes: smaller ones share a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.RunConfig, command.Output):
  """Tell whether a run fits GPUs or TPUs that are not here, and its time.

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
    0 if it fits, 1 if it does not, or may not.
  """
  import jax

  from moh_jax.training.plan import make_plan

  jax.config.update("jax_platforms", "cpu")  # no device of this machine is used
  topology = parse_topology(options.topology)
  plan = make_plan(options.loaded, topology, not options.no_compile)
  options.give(_report(plan), _lines(plan))
  return 0 if plan.fits else 1


def _lines(plan: Plan) -> Iterator[str]:
  """The plan for people."""
  from moh_jax.training.flops import changes_heads, form_summary
  from moh_jax.training.plan import assumptions

  config, topology, chip = plan.config, plan.topology, plan.topology.chip
  ends = ""
  if changes_heads(config):
    ends = " in the end, as all figures of active heads (tune.top_k_steps)"
  rank = config.tune.lora.rank
  tuned = f" (adapters of rank {rank} are trained)" if rank else ""
  yield (
    f"model: {config.model.family}, {plan.parameters:,} parameters{tuned}, "
    f"{config.model.activated_share:.1%} of the heads active{ends}"
  )
  for name, value in plan.assumed.items():
    yield f"assumed, since the data are not here: model.{name}={value}"
  slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
  yield (
    f"topology: {slices}{topology.name}, {topology.devices} x {chip.kind} on "
    f"{topology.hosts} host(s), {_gb(chip.memory)} each"
  )
  parts = config.optim.accumulation
  yield (
    f"mesh: {', '.join(f'{axis}={n}' for axis, n in plan.mesh.items())}; "
    f"{config.data.batch_size} examples a step in {parts} microbatch(es) of "
    f"{config.data.batch_size // parts}"
  )
  names, share = form_summary(config, plan.attention)
  yield f"attention: {names}\n\n{_layout_table(plan)}\n"
  sizes = dataclasses.asdict(plan.memory) | {"together": plan.memory.total}
  rows = [(name, _gb(size), "") for name, size in sizes.items() if size]
  why = f"of one microbatch and the sum over {parts}" if parts > 1 else ""
  if config.mesh.gather == "step" and plan.mesh["fsdp"] > 1:
    why = "with the parameters of a step, whole on each device"
  rows += [
    ("gradients", _gb(plan.gradients), why),
    ("activations", _gb(plan.kept), "that the backward pass reads"),
  ]
  yield command.table(rows, ("memory of a device", "", ""))
  yield f"\n{_verdict(plan)}"
  if other := plan.microbatches():
    what = "fewer microbatches should fit too" if plan.fits else "should fit"
    change = f"--config.optim.accumulation={other[0]}"
    again = " and gathers the parameters for each of them"
    again *= config.mesh.gather == "microbatch" and plan.mesh["fsdp"] > 1
    yield f"{what}: {change} needs about {_gb(other[1])}{again}"
  elif not plan.fits:
    state = plan.memory.total + plan.gradients
    rest = ", and one example a device needs more than the rest"
    yield (
      f"no number of microbatches fits: state and gradients are {_gb(state)} "
      f"of {_gb(plan.limit)}{rest * (state < plan.limit)}; mesh.fsdp or "
      "mesh.tensor split them over devices, model.remat keeps fewer activations"
    )
  if plan.exchanges:
    yield f"\n{_exchange_table(plan)}"
  if plan.compiled and plan.compiled.collectives:
    yield f"\n{_collective_table(plan)}\n"
  yield (
    f"FLOPs of a step: {plan.flops:.4g} for the active heads, "
    f"{plan.baseline_flops:.4g} with every head (multi-head attention)\n"
    f"  {plan.computed_flops:.4g} computed: projections of all heads, "
    f"attention of {share:.1%} of the heads ({names})"
  )
  if plan.recomputed_flops:
    remat = f"model.remat={config.model.remat}"
    yield f"  {plan.recomputed_flops:.4g} computed again ({remat})"
  time, steps = plan.step_time, config.train.steps
  communication = "communication not counted, which takes a compiler"
  if plan.compiled and plan.compiled.fits:
    communication = (
      f"communication {time.communication:.3g} s; {time.slowest:.3g} s if no "
      "communication is hidden"
    )
  yield (
    f"predicted: {time.seconds:.3g} s a step, "
    f"{plan.units_per_step / time.seconds:,.0f} {plan.unit}/s, "
    f"{steps * time.seconds / 3600:,.1f} hours for {steps:,} steps\n"
    f"  products {time.products:.3g} s, update {time.update:.3g} s, "
    f"{communication}; assumed:"
  )
  yield from (f"  - {text}" for text in assumptions(plan))


def _layout_table(plan: Plan) -> str:
  """How parameters are split; small ones that are whole share a row."""
  rows, small = [], []
  for row in plan.layouts:
    if not any(row.axes) and row.bytes < _SMALL * plan.memory.parameters:
      small.append(row)
      continue
    shape = " x ".join(
      f"{size}/{axis}" if axis else f"{size}"
      for size, axis in zip(row.shape, row.axes)
    )
    rows.append((row.number, row.name, shape, row.dtype, _gb(row.bytes)))
  if small:
    count = sum(row.number for row in small)
    dtypes = "+".join(sorted({row.dtype for row in small}))
    size = _gb(sum(row.bytes for row in small))
    rows.append((count, "smaller ones", "not split", dtypes, size))
  header = ("count", "parameter", "shape and mesh axes", "dtype", "on a device")
  return command.table(rows, header)


def _exchange_table(plan: Plan) -> str:
  """What the values of `mesh.gather` cost, the run's own first."""
  ours, found = plan.exchanges[0], plan.compiled
  rows = []
  for one in plan.exchanges:
    row = (f"mesh.gather={one.gather}", _gb(one.memory), _gb(one.bytes))
    row += (f"{one.seconds:.3g} s",)
    if found:
      row += (_gb(found.total - ours.memory + one.memory),)
    rows.append(row)
  header = ("gradients, gathered parameters", "on a device", "sent", "takes")
  return command.table(rows, header + ("step",) * bool(found))


def _collective_table(plan: Plan) -> str:
  rows = [
    (
      *(one.kind, one.dtype, "+".join(one.axes), len(one.devices)),
      *(one.count, _gb(one.bytes)),
    )
    for one in plan.compiled.collectives
  ]
  header = ("collective", "dtype", "axes", "devices", "in a step", "bytes")
  return command.table(rows, header)


def _verdict(plan: Plan) -> str:
  """Whether a run fits, and who says so."""
  word, found = "fits" if plan.fits else "does not fit", plan.compiled
  if not found:
    least, most = plan.bounds
    word = "may not fit" if least <= plan.limit else word
    word = "should fit" if plan.fits else word
    return (
      f"{word}: {_gb(least)} at least, with temporaries about {_gb(most)} at "
      f"most, of {_gb(plan.limit)}; a compiler counts them: {plan.not_compiled}"
    )
  parts = ""
  if found.arguments is not None:
    parts = (
      f" (arguments {_gb(found.arguments)}, temporaries "
      f"{_gb(found.temporaries)})"
    )
  return (
    f"{word}: {_gb(found.total)} of {_gb(found.limit)}{parts}, compiled by "
    f"{found.compiler} in {found.seconds:.0f} s"
  )


def _gb(size: float) -> str:
  return f"{size / 1e9:,.3f} GB"


def _report(plan: Plan) -> dict[str, Any]:
  """The plan for JSON."""
  from moh_jax.training.plan import assumptions

  seconds, topology = plan.step_time.seconds, plan.topology
  values = dataclasses.asdict(dataclasses.replace(plan, config=None))
  values["memory"]["total"] = plan.memory.total
  values["bounds"] = plan.bounds
  values["topology"] |= {"devices": topology.devices, "hosts": topology.hosts}
  return values | {
    "config": config_lib.to_dict(plan.config),
    "assumptions": assumptions(plan),
    "fits": plan.fits,
    "step_seconds": seconds,
    f"{plan.unit}_per_second": plan.units_per_step / seconds,
    "hours": plan.config.train.steps * seconds / 3600,
  }
