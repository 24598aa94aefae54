"""`python -m moh_jax plan`."""

import argparse
import dataclasses
from typing import Any

import jax

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.plan import plan as plan_lib
from moh_jax.plan import step_time
from moh_jax.plan.plan import Fitting, Plan
from moh_jax.runtime.topology import USABLE
from moh_jax.speed import model_forms

_MEMORY = {
  "parameters": "parameters",
  "optimizer": "optimizer",
  "ema": "averaged parameters",
  "batch": "batch",
  "gradients": "gradients",
  "activations": "activations (estimated)",
}

_SMALL = 1e-3  # of the parameters' bytes: smaller ones share a row


def run(args: argparse.Namespace) -> int:
  """Prints what a run needs on a topology.

  Returns:
    0 if it fits, 1 if it does not.
  """
  jax.config.update("jax_platforms", "cpu")  # no device of this machine is used
  plan = plan_lib.make_plan(args.config, args.topology, args.compile)
  if args.json != "-":
    _print(plan)
  common.write_json(args.json, _report(plan))
  return 0 if plan.fits else 1


def _print(plan: Plan) -> None:
  model, chip = plan.config.model, plan.topology.chip
  ends = ""
  if model_forms.changes_heads(plan.config):
    ends = " in the end, as all figures of active heads (tune.top_k_steps)"
  print(
    f"model: {model.family}, {plan.parameters:,} parameters, "
    f"{model.activated_share:.1%} of the heads active{ends}"
  )
  for name, value in plan.assumed.items():
    print(f"assumed, since the data are not here: model.{name}={value}")
  topology = plan.topology
  slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
  print(
    f"topology: {slices}{topology.name}, {topology.devices} x {chip.kind} on "
    f"{topology.hosts} host(s), {_gb(chip.memory)} each"
  )
  print(f"mesh: {_mesh(plan, plan.run)}")
  forms = dict.fromkeys(form.name for form in plan.run.estimate.forms)
  print(f"attention: {', '.join(forms)}\n")
  print(_layout_table(plan) + "\n")
  memory = plan.run.estimate.memory
  rows = [(text, _gb(getattr(memory, key))) for key, text in _MEMORY.items()]
  rows.append(("together", _gb(memory.total)))
  if memory.host:
    rows.insert(-1, ("copied from the host in a step", _gb(memory.host)))
  print(common.table(rows, ("memory of a device", "")) + "\n")
  print(_verdict(plan, plan.run))
  _print_collectives(plan.run)
  print(
    f"FLOPs of a step: {plan.flops:.4g} for the active heads, "
    f"{plan.baseline_flops:.4g} with every head (multi-head attention)"
  )
  estimate = plan.run.estimate
  names, share = model_forms.summary(plan.config, estimate.forms)
  print(
    f"  {sum(estimate.flops.values()):.4g} computed: projections of all heads, "
    f"attention of {share:.1%} ({names})"
  )
  if again := step_time.recomputed(plan.config, estimate.flops):
    print(
      f"  {again:.4g} computed again (model.remat={plan.config.model.remat})"
    )
  time = plan_lib.step_time_of(plan, plan.run)
  print(_time(plan, plan.run))
  print(
    f"  products {time.products:.3g} s, update {time.update:.3g} s, "
    f"communication {time.communication:.3g} s; {time.slowest:.3g} s if no "
    "communication is hidden; assumed:"
  )
  compiled = plan.run.compiled is not None and plan.run.compiled.fits
  for text in step_time.assumptions(plan.config, plan.topology, compiled):
    print(f"  - {text}")
  if not plan.fits:
    _print_proposal(plan)


def _layout_table(plan: Plan) -> str:
  """How parameters are split; small ones that are whole share a row."""
  whole = plan.run.estimate.memory.parameters
  small = [
    row
    for row in plan.layouts
    if not any(row.axes) and row.bytes < _SMALL * whole
  ]
  rows = [
    (
      *(row.number, row.name, _shape(row.shape, row.axes), row.dtype),
      _gb(row.bytes),
    )
    for row in plan.layouts
    if row not in small
  ]
  if small:
    count = sum(row.number for row in small)
    dtypes = "+".join(sorted({row.dtype for row in small}))
    size = _gb(sum(row.bytes for row in small))
    rows.append((count, "smaller ones", "not split", dtypes, size))
  header = ("count", "parameter", "shape and mesh axes", "dtype", "on a device")
  return common.table(rows, header)


def _print_collectives(fitting: Fitting) -> None:
  if not fitting.compiled or not fitting.compiled.collectives:
    return
  rows = [
    (
      *(one.kind, one.dtype, "+".join(one.axes), len(one.devices)),
      *(one.count, _gb(one.bytes)),
    )
    for one in fitting.compiled.collectives
  ]
  header = ("collective", "dtype", "axes", "devices", "in a step", "bytes")
  print("\n" + common.table(rows, header) + "\n")


def _print_proposal(plan: Plan) -> None:
  if plan.proposal is None:
    print("proposal: none; no mesh and accumulation was found that fits")
    return
  before, after = plan.run.estimate.config, plan.proposal.estimate.config
  old, new = plan.run.estimate.mesh, plan.proposal.estimate.mesh
  flags = [
    f"--config.mesh.{axis}={getattr(after.mesh, axis)}"
    for axis, size in new.items()
    if size != old[axis]
  ]
  if before.optim.accumulation != after.optim.accumulation:
    flags.append(f"--config.optim.accumulation={after.optim.accumulation}")
  print(f"proposal: {' '.join(flags)}")
  print(f"  {_verdict(plan, plan.proposal)}")
  print(f"  {_time(plan, plan.proposal)}")


def _verdict(plan: Plan, fitting: Fitting) -> str:
  """Whether a run fits, and who says so."""
  word = "fits" if fitting.fits(plan.topology) else "does not fit"
  found = fitting.compiled
  if not found:
    limit = USABLE * plan.topology.chip.memory
    return (
      f"{word}, estimated: {_gb(fitting.estimate.memory.total)} of "
      f"{_gb(limit)}; not compiled: {fitting.reason}"
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


def _time(plan: Plan, fitting: Fitting) -> str:
  seconds = plan_lib.step_time_of(plan, fitting).seconds
  steps = plan.config.train.steps
  return (
    f"predicted: {seconds:.3g} s a step, {plan.units_per_step / seconds:,.0f} "
    f"{plan.unit}/s, {steps * seconds / 3600:,.1f} hours for {steps:,} steps"
  )


def _mesh(plan: Plan, fitting: Fitting) -> str:
  sizes, data = fitting.estimate.mesh, plan.config.data
  accumulation = fitting.estimate.config.optim.accumulation
  text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
  examples = data.batch_size // accumulation
  return (
    f"{text}; {data.batch_size} examples a step in {accumulation} "
    f"microbatch(es) of {examples}"
  )


def _shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
  """Text of a shape with what splits each dimension, "4096/fsdp x 128"."""
  parts = [
    f"{size}/{axis}" if axis else f"{size}" for size, axis in zip(shape, axes)
  ]
  return " x ".join(parts) or "1"


def _gb(size: float) -> str:
  return f"{size / 1e9:,.3f} GB"


def _report(plan: Plan) -> dict[str, Any]:
  """The plan for JSON."""

  def fitting(one: Fitting | None) -> dict[str, Any] | None:
    if one is None:
      return None
    time = plan_lib.step_time_of(plan, one)
    return {
      "mesh": one.estimate.mesh,
      "accumulation": one.estimate.config.optim.accumulation,
      "memory": dataclasses.asdict(one.estimate.memory)
      | {"total": one.estimate.memory.total},
      "fits": one.fits(plan.topology),
      "compiled": dataclasses.asdict(one.compiled) if one.compiled else None,
      "not_compiled": one.reason or None,
      "attention": [dataclasses.asdict(x) for x in one.estimate.forms],
      "computed_flops": sum(one.estimate.flops.values()),
      "recomputed_flops": step_time.recomputed(plan.config, one.estimate.flops),
      "step_seconds": time.seconds,
      "step_time": dataclasses.asdict(time),
      f"{plan.unit}_per_second": plan.units_per_step / time.seconds,
      "hours": plan.config.train.steps * time.seconds / 3600,
    }

  topology = plan.topology
  compiled = plan.run.compiled is not None and plan.run.compiled.fits
  return {
    "topology": {
      "name": topology.name,
      "slices": topology.slices,
      "devices": topology.devices,
      "hosts": topology.hosts,
      "chip": dataclasses.asdict(topology.chip),
    },
    "config": config_lib.to_dict(plan.config),
    "assumed": plan.assumed,
    "parameters": plan.parameters,
    "layouts": [dataclasses.asdict(row) for row in plan.layouts],
    "flops": plan.flops,
    "baseline_flops": plan.baseline_flops,
    "assumptions": step_time.assumptions(plan.config, topology, compiled),
    **fitting(plan.run),
    "proposal": fitting(plan.proposal),
  }
