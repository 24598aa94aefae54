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

from moh_jax.config import (
  Config,
  apply_overrides,
  get_family,
  released_model,
  without_router,
)
from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.data.infer import resolve
from moh_jax.runtime import sharding
from moh_jax.speed import compare, model_programs, timing
from moh_jax.speed.compare import Variant
from moh_jax.speed.options import check_at_least_1, check_names
from moh_jax.speed.report import Row
from moh_jax.training.program import make_program


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """Options of `bench model`.

  Attributes:
    model: released name of the model, where no config is given.
    config: run to measure; its data need not exist, as batches are random.
    lengths: tokens of a sequence; None is the run's own.
    implementations: forms of attention, each a variant of the model.
    batch: images or sequences per batch.
    dtype: compute dtype; None is the run's own.
    remat: what the backward pass recomputes; None is the run's own.
    sampler_steps: steps of a diffusion model's sampler.
    compile_only: compile the train step and measure nothing else.
    rounds: measured turns.

  Raises:
    ValueError: an option is out of range; the message names it.
  """

  model: str = "moh-vit-s80"
  config: Config | None = None
  lengths: tuple[int, ...] | None = None
  implementations: tuple[str, ...] = ("auto",)
  batch: int = 4
  dtype: str | None = None
  remat: str | None = None
  sampler_steps: int = 10
  compile_only: bool = False
  rounds: int = 7

  def __post_init__(self):
    for name in ("batch", "sampler_steps", "rounds"):
      check_at_least_1(name, [getattr(self, name)])
    check_names("implementations", self.implementations, IMPLEMENTATIONS)
    check_at_least_1("lengths", self.lengths or ())
    self.runs()

  def runs(self) -> list[Config]:
    """Runs on random data, one for each length; the longest is the last."""
    section = self.config.model if self.config else released_model(self.model)
    family = get_family(section.family)
    run = resolve(family.bench_run(section, self.batch))
    changes = {"dtype": self.dtype, "remat": self.remat}
    given = {name: value for name, value in changes.items() if value}
    run = apply_overrides(run, "model", **given)
    if self.lengths is None:
      return [run]
    return [family.with_length(run, n) for n in sorted(self.lengths)]

  def variants(self, run: Config) -> dict[str, Any]:
    """Model sections to compare by name of the form; "mha" is the baseline."""
    models = {
      name: dataclasses.replace(run.model, attention_impl=name)
      for name in self.implementations
    }
    return {**models, "mha": without_router(run.model)}


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
    family = get_family(run.model.family)
    rows, further = family.measure_inference(options, run, models)
    result["rows"] += rows
    result |= further
  result["peak_resident_bytes"] = timing.peak_resident_bytes()
  return result


def _rows(
  options: ModelOptions, run: Config, models: dict[str, Any]
) -> list[Row]:
  shares = {name: model.activated_share for name, model in models.items()}
  programs = {
    name: model_programs.programs(dataclasses.replace(run, model=model))
    for name, model in models.items()
  }
  length = getattr(run.data, "sequence_length", None)
  rows = []
  for mode in ("forward", "forward_backward"):
    variants = [
      Variant(name, shares[name], made[mode], name == "mha")
      for name, made in programs.items()
    ]
    if mode == "forward" and run.model.router.kind == "two_stage":
      routers = model_programs.routers(run)
      variants.append(Variant("router", run.model.activated_share, routers))
    rows += compare.measure(
      variants,
      op="model",
      mode=mode,
      length=length,
      units=options.batch * (length or 1),
      rounds=options.rounds,
      min_seconds=0.0,
    )
  return rows


def _train_step(run: Config) -> dict[str, float]:
  """Seconds to compile the whole train step, and the bytes of its state."""
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  task = get_family(run.model.family).tasks().make_task(run)
  _, state, step = make_program(run, task, mesh)
  batch = next(task.batches(mesh))
  start = time.perf_counter()
  compiled = step.lower(state, batch).compile()
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
