"""Benchmark of a model beside its multi-head baseline: time, memory, compiling.

"forward" computes the training loss of one batch of random data,
"forward_backward" its gradients too. The baseline is the same network with the
router off; "router" is the forward time of all routers of the model alone.
Families add measurements of inference: sampling images, or reading prompts and
generating tokens.
"""

import dataclasses
import time
from typing import Any

import jax

from moh_jax.config import Config
from moh_jax.runtime import sharding
from moh_jax.speed import (
  compare,
  model_forms,
  model_programs,
  sampling,
  timing,
  writing,
)
from moh_jax.speed.compare import Variant
from moh_jax.speed.options import ModelOptions
from moh_jax.speed.report import Row
from moh_jax.training.entrance import check_memory
from moh_jax.training.program import make_program
from moh_jax.training.task import task_builder


def measure(options: ModelOptions) -> dict[str, Any]:
  """Measures a model.

  Args:
    options: options of `bench model`.

  Returns:
    {"rows": list of `Row`, "train_step": seconds to compile the train step of
    the longest run and its bytes, "peak_resident_bytes": of the process}, and
    entries that the family adds, such as "sampler".
  """
  runs = options.runs()
  result = {"train_step": _train_step(runs[-1]), "rows": []}
  for run in () if options.compile_only else runs:
    models = options.variants(run)
    result["rows"] += _rows(options, run, models)
    if run.model.READS_TEXT:
      result["rows"] += writing.measure(run, models, options.rounds)
    elif "sample" in run.sections:
      result["sampler"] = sampling.measure(options, run)
  result["peak_resident_bytes"] = timing.peak_resident_bytes()
  return result


def _rows(
  options: ModelOptions, run: Config, models: dict[str, Any]
) -> list[Row]:
  programs = {
    name: model_programs.programs(dataclasses.replace(run, model=model))
    for name, model in models.items()
  }
  forms = {}
  for name, model in models.items():
    variant = dataclasses.replace(run, model=model)
    forms[name] = model_forms.summary(
      variant, model_forms.step_forms(variant, {})
    )
  length = getattr(run.data, "sequence_length", None)
  rows = []
  for mode in ("forward", "forward_backward"):
    routers, router = [], run.model.router
    reads_tokens = router.kind != "none" and not router.reads_norms
    if mode == "forward" and reads_tokens:
      share, program = run.model.activated_share, model_programs.routers(run)
      routers = [Variant("router", share, program)]
    rows += compare.measure_models(
      models,
      {name: made[mode] for name, made in programs.items()},
      forms,
      *routers,
      mode=mode,
      length=length,
      units=options.batch * (length or 1),
      rounds=options.rounds,
    )
  return rows


def _train_step(run: Config) -> dict[str, float]:
  """Seconds to compile the whole train step, and the bytes of its state."""
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  objective = task_builder(run).make_objective(run)
  program = make_program(run, objective, mesh)
  check_memory(run, mesh, program)
  state = program.state
  start = time.perf_counter()
  compiled = program.step.lower(state, program.batch).compile()
  seconds = time.perf_counter() - start
  return {
    "compile_seconds": seconds,
    "params_bytes": _bytes(state.params),
    "optimizer_bytes": _bytes(state.opt_state),
    "ema_bytes": _bytes(state.ema),
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
  }


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
