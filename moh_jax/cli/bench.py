"""Time attention, a whole model or a run's input."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import typing
from typing import TYPE_CHECKING, Any, Literal

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.config import Config
from moh_jax.config.base import Count, Dtype, Natural
from moh_jax.config.heads import HeadBudget, RouterConfig, Structure, Units
from moh_jax.config.layers import Implementation
from moh_jax.config.parse import changed
from moh_jax.runtime import steps
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  from collections.abc import Sequence

  from moh_jax.training.bench import Row

_LENGTH = 512  # tokens of the sequences that models are timed with
_BATCH = 4  # images or sequences
_EMA_DECAY = 0.9999  # of the released recipe of diffusion models
_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(command.Output):
  """Time the core alone: outputs of heads from queries, keys and values.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percentages of heads that are active, such as 50 and 75.
    implementations: forms to compare with those that compute every head;
      without it every form that the device can run.
    heads: query heads, H.
    head_dim: head dim, D.
    kv_heads: key/value heads, K; without it one per query head.
    structure: what tokens choose among: heads, as many heads of each key/value
      group, or whole groups.
    shared: heads that are always active; without it a quarter of them.
    batch: sequences per batch, B.
    dtype: compute dtype.
    rounds: measured turns.
    modes: passes to run, of forward, forward_backward, causal and
      causal_forward_backward.
  """

  lengths: tuple[Count, ...] = (256, 512, 1024)
  shares: tuple[float, ...] = (50, 75)
  implementations: tuple[Implementation, ...] | None = None
  heads: Count = 32
  head_dim: Count = 64
  kv_heads: Count | None = None
  structure: Structure = "free"
  shared: Natural | None = None
  batch: Count = 1
  dtype: Dtype = "float32"
  rounds: Count = 7
  modes: tuple[
    Literal["forward", "forward_backward", "causal", "causal_forward_backward"],
    ...,
  ] = ("forward", "forward_backward", "causal")

  FORMS = typing.get_args(Implementation)

  def check(self) -> None:
    """Heads can be divided as the options say."""
    super().check()
    if self.heads % self.num_kv_heads:
      self.fail("kv_heads", f"must divide --heads {self.heads}")
    if self.shared is not None and self.shared > self.heads:
      self.fail("shared", f"must be in [0, {self.heads}], the heads")
    self.budgets()

  @property
  def num_kv_heads(self) -> int:
    """Number of key/value heads, K."""
    return self.heads if self.kv_heads is None else self.kv_heads

  def budgets(self) -> list[HeadBudget]:
    """Head splits, one for each of `shares`."""
    return [self._budget(share) for share in self.shares]

  def _budget(self, share: float) -> HeadBudget:
    shared = self.heads // 4 if self.shared is None else self.shared
    exact = share * self.heads / 100
    active = round(exact) if math.isfinite(exact) else 0
    if not 1 <= active <= self.heads or abs(exact - active) > _ROUNDING:
      raise ValueError(
        f"--shares {share:g} must be a whole number of the {self.heads} heads: "
        f"a multiple of {100 / self.heads:g} up to 100"
      )
    if active < shared:
      raise ValueError(
        f"--shares {share:g} is {active} of the {self.heads} heads and must be "
        f"at least the {shared} shared ones (--shared)"
      )
    budget = HeadBudget(self.heads, shared, active - shared, self.head_dim)
    self.units(budget)
    return budget

  def units(self, budget: HeadBudget) -> Units:
    """What tokens choose among."""
    router = RouterConfig(structure=self.structure)
    return Units.of(budget, router, self.num_kv_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(command.Stored, command.RunConfig, command.Output):
  """Time a whole model and its multi-head baseline, on random data.

  units/s are tokens or images. --config.KEY=VALUE
  changes a key of what is timed, such as --config.data.batch_size=8 (of 4
  examples), --config.model.dtype=bfloat16, --config.model.attention_impl=dense
  or --config.data.sequence_length=1024 (of 512 tokens, or the longest sequence
  of the model).

  Attributes:
    model: released name of the model, where neither of the next two is given.
    config: config file of the run, as FILE or FILE:ARG; its data need not
      exist.
    checkpoint: workdir of `train` or output of `convert`.
    lengths: tokens of a sequence, for language models; else rows and columns of
      the images or latents; without it the model's own.
    rounds: measured turns.
  """

  model: str = "moh-vit-s80"
  config: command.Place | None = None
  checkpoint: command.Place | None = None
  lengths: tuple[Count, ...] = ()
  rounds: Count = 7

  def check(self) -> None:
    """The model is stated once; the devices are known; there is work."""
    super().check()
    if self.config is not None and self.checkpoint is not None:
      self.fail("config", "and --checkpoint exclude each other")
    config_lib.released_model(self.model)

  def changeable(self) -> bool:
    """A released model has keys too."""
    return True

  @functools.cached_property
  def loaded(self) -> Config:
    """The config of --config; the changes are of what is timed."""
    return steps.load_config(self.config, ())

  def runs(self) -> dict[int | None, Config]:
    """The runs on random data that are timed, by their lengths."""
    from moh_jax.data.infer import resolve, resolve_without_data

    model = config_lib.released_model(self.model)
    if self.config is not None:
      model = resolve_without_data(self.loaded)[0].model
    elif self.checkpoint is not None:
      model = self.stored()[0].config.model
    if self.lengths and not model.SIZE:
      self.fail("lengths", f"must be left out for family {model.family!r}")
    return {
      length: changed(resolve(bench_run(model, _BATCH, length)), self.changes)
      for length in self.lengths or (None,)
    }


def bench_run(model: Any, batch: int, length: int | None = None) -> Config:
  """A run of a model section on random data, `batch` examples per step.

  Args:
    model: the section. Diffusion models keep averaged parameters.
    batch: examples per step.
    length: see `ModelOptions.lengths`; where it is None, language models read
      512 tokens, or their longest sequence if that is shorter.
  """
  data, others = {"batch_size": batch}, {}
  if length is not None:
    size = length if model.READS_TEXT else (length, length)
    model = dataclasses.replace(model, **{model.SIZE: size})
  if model.READS_TEXT:
    data["sequence_length"] = length or min(_LENGTH, model.max_length)
  if "diffusion" in model.SECTIONS:
    others["optim"] = config_lib.OptimConfig(ema_decay=_EMA_DECAY)
  return Config(model=model, data=model.DATA(**data), **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions(command.RunConfig, command.Output):
  """Time every stage of a run's input, and its train step.

  Attributes:
    batches: to time the input with.
    steps: to time the train step with.
  """

  batches: Count = 20
  steps: Count = 10


def report(options: command.Output, rows: Sequence[Row], settings: dict) -> int:
  """Gives rows with the machine; 1 if any has a fault, which stderr tells.

  Args:
    options: of the command.
    rows: what was measured.
    settings: that it depends on, for JSON.
  """
  from moh_jax.training import bench

  stored = [dataclasses.asdict(row) for row in rows]
  result = {"machine": bench.machine(), "settings": settings, "rows": stored}
  options.give(result, [command.table(*bench.table_cells(rows))])
  for row in rows:
    if row.fault:
      print(f"error: {row.name}: {row.fault}", file=sys.stderr)
  return 1 if any(row.fault for row in rows) else 0


@alive("measuring")
def run_attention(options: HeadOptions) -> int:
  """Prints a table of what was measured; 1 if any of it is not exact."""
  from moh_jax.cli.bench_attention import compare_forms, splits

  rows = compare_forms(options, "attention", splits)
  return report(options, rows, options.values())


@alive("measuring")
def run_model(options: ModelOptions) -> int:
  """Prints a table of what was measured and predicted."""
  from moh_jax.cli.run_speed import measure_model

  rows, runs = [], options.runs()
  for length, run in runs.items():
    if run.model.READS_TEXT:
      length = run.data.sequence_length
    elif length:  # the changes may have another one
      length = getattr(run.model, run.model.SIZE)[0]
    rows += measure_model(run, length, options.rounds)
  modes = list(dict.fromkeys(row.mode for row in rows))
  rows.sort(key=lambda row: modes.index(row.mode))
  settings = {**options.values(), "config": config_lib.to_dict(run)}
  return report(options, rows, settings)


@alive("measuring")
def run_input(options: InputOptions) -> int:
  """Prints examples per second by stage, and which stage is the slowest."""
  from moh_jax.cli.run_speed import measure_input
  from moh_jax.data.infer import resolve
  from moh_jax.training import bench

  config = resolve(options.loaded)
  measured = measure_input(config, options.batches, options.steps)
  rates, slowest = measured["examples_per_second"], measured["bottleneck"]
  rows = [(stage, f"{rate:,.0f}") for stage, rate in rates.items()]
  settings = {"config": config_lib.to_dict(config)}
  options.give(
    {"machine": bench.machine(), "settings": settings, **measured},
    [command.table(rows, ("stage", "examples/s")), f"bottleneck: {slowest}"],
  )
  return 0


KINDS = {
  "attention": (HeadOptions, run_attention),
  "model": (ModelOptions, run_model),
  "input": (InputOptions, run_input),
}
