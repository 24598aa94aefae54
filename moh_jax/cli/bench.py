"""Time attention, a whole model or a run's input."""

from __future__ import annotations

import dataclasses
from typing import Any

from moh_jax import config as config_lib
from moh_jax.cli.head_options import HeadOptions
from moh_jax.cli.options import Output, Place, RunConfig, Stored
from moh_jax.config import Config
from moh_jax.config.base import Count
from moh_jax.config.layers import Implementation
from moh_jax.config.parse import changed

_LENGTH = 512  # tokens of the sequences that models are timed with
_BATCH = 4  # images or sequences
_EMA_DECAY = 0.9999  # of the released recipe of diffusion models


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(Stored, RunConfig, Output):
  """Time a whole model and its multi-head baseline, on random data.

  --config.KEY=VALUE changes a key of what is timed, such as
  --config.data.batch_size=8 (of 4 examples), --config.model.dtype=bfloat16,
  --config.data.sequence_length=1024 (of 512 tokens, or the longest sequence of
  the model) or --config.sample.steps=10.

  Attributes:
    model: released name of the model, where neither of the next two is given.
    config: config file of the run, as FILE or FILE:ARG; its data need not
      exist.
    checkpoint: workdir of `train` or output of `convert`.
    implementations: forms of attention, each a variant of the model.
    compile_only: compile the train step and measure nothing else.
    rounds: measured turns.
  """

  model: str = "moh-vit-s80"
  config: Place | None = None
  checkpoint: Place | None = None
  implementations: tuple[Implementation, ...] = ("auto",)
  compile_only: bool = False
  rounds: Count = 7

  def check(self) -> None:
    """The model is stated once."""
    super().check()
    if self.config is not None and self.checkpoint is not None:
      self.fail("config", "and --checkpoint exclude each other")
    config_lib.released_model(self.model)

  def changeable(self) -> bool:
    """A released model has keys too."""
    return True

  def run(self) -> Config:
    """The run on random data that is timed."""
    from moh_jax.data.infer import resolve

    model = config_lib.released_model(self.model)
    if self.config is not None:
      model = resolve(self.loaded).model
    elif self.checkpoint is not None:
      model = self.stored()[0].config.model
    run = changed(resolve(bench_run(model, _BATCH)), self.changes)
    if "sample" in run.sections and not run.sample.steps.isdecimal():
      run.sample.fail("steps", "must be a number")
    return run

  def variants(self, run: Config) -> dict[str, Any]:
    """Model sections to compare by name of the form; "mha" is the baseline."""
    models = {
      name: dataclasses.replace(run.model, attention_impl=name)
      for name in self.implementations
    }
    return {**models, "mha": config_lib.without_router(run.model)}


def bench_run(model: Any, batch: int) -> Config:
  """A run of a model section on random data, `batch` examples per step.

  Language models read 512 tokens, or their longest sequence if that is shorter;
  diffusion models keep averaged parameters.
  """
  data, others = {"batch_size": batch}, {}
  if model.READS_TEXT:
    data["sequence_length"] = min(_LENGTH, model.max_length)
  if "diffusion" in model.SECTIONS:
    others["optim"] = config_lib.OptimConfig(ema_decay=_EMA_DECAY)
  if "sample" in model.SECTIONS:
    others["sample"] = config_lib.SampleConfig(steps="10")
  return Config(model=model, data=model.DATA(**data), **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions(RunConfig, Output):
  """Time every stage of a run's input, and its train step.

  Attributes:
    batches: to time the input with.
    steps: to time the train step with.
  """

  batches: Count = 20
  steps: Count = 10


def run_attention(options: HeadOptions) -> int:
  """Prints a table of what was measured; 1 if any of it is not exact."""
  from moh_jax.cli import bench_attention

  result = bench_attention.run_heads(
    *(options, "attention", bench_attention.splits),
    bench_attention.check_shapes,
  )
  return bench_attention.report(options, result)


def run_model(options: ModelOptions) -> int:
  """Prints a table of what was measured; 1 if any of it does not run."""
  from moh_jax.cli import bench_attention, bench_model

  run = options.run()
  settings = {**options.values(), "config": config_lib.to_dict(run)}
  result = {
    "settings": settings,
    **bench_model.measure(
      *(run, options.variants(run), options.rounds),
      compile_only=options.compile_only,
    ),
  }
  return bench_attention.report(options, result)


def run_input(options: InputOptions) -> int:
  """Prints examples per second by stage, and which stage is the slowest."""
  from moh_jax.cli import bench_input
  from moh_jax.data.infer import resolve
  from moh_jax.training import timing

  config = resolve(options.loaded)
  measured = bench_input.measure(config, options.batches, options.steps)
  settings = {"config": config_lib.to_dict(config)}
  options.give(
    {"machine": timing.machine(), "settings": settings, **measured},
    bench_input.lines(measured),
  )
  return 0


KINDS = {
  "attention": (HeadOptions, run_attention),
  "model": (ModelOptions, run_model),
  "input": (InputOptions, run_input),
}
