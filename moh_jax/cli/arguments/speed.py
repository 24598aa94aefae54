"""Options of `bench`, declared without JAX."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from moh_jax import config as config_lib
from moh_jax.cli import common, fields
from moh_jax.config import Config
from moh_jax.config.base import DTYPES
from moh_jax.config.heads import HeadBudget
from moh_jax.config.layers import IMPLEMENTATIONS

MODES = ("forward", "forward_backward", "causal", "causal_forward_backward")
_BENCH_LENGTH = 512  # tokens, where `bench --lengths` is not given
_EMA_DECAY = 0.9999  # of the released recipe of diffusion models
_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number


@dataclasses.dataclass(frozen=True)
class HeadOptions:
  """Options of a benchmark of heads, such as that of attention.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percentages of heads that are active, such as 50 and 75.
    implementations: forms to compare with those that compute every head; None
      is every form that the device can run.
    heads: query heads, H.
    head_dim: head dim, D.
    kv_heads: key/value heads, K; None is one per query head.
    shared: heads that are always active; None is a quarter of them.
    batch: sequences per batch, B.
    dtype: compute dtype.
    rounds: measured turns.
    modes: passes to run.

  Raises:
    ValueError: an option is out of range; the message names it.
  """

  lengths: tuple[int, ...] = (256, 512, 1024)
  shares: tuple[float, ...] = (50, 75)
  implementations: tuple[str, ...] | None = None
  heads: int = 32
  head_dim: int = 64
  kv_heads: int | None = None
  shared: int | None = None
  batch: int = 1
  dtype: str = "float32"
  rounds: int = 7
  modes: tuple[str, ...] = ("forward", "forward_backward", "causal")

  CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
    "implementations": IMPLEMENTATIONS,
    "dtype": DTYPES,
    "modes": MODES,
  }

  def __post_init__(self):
    check_options(self)
    if self.heads % self.num_kv_heads:
      raise ValueError(
        f"--kv-heads {self.kv_heads} must divide --heads {self.heads}"
      )
    if not 0 <= self.num_shared <= self.heads:
      raise ValueError(
        f"--shared {self.shared} must be in [0, {self.heads}], the heads"
      )
    self.budgets()

  @property
  def num_kv_heads(self) -> int:
    """Number of key/value heads, K."""
    return self.heads if self.kv_heads is None else self.kv_heads

  @property
  def num_shared(self) -> int:
    """Number of heads that are always active."""
    return self.heads // 4 if self.shared is None else self.shared

  def budgets(self) -> list[HeadBudget]:
    """Head splits, one for each of `shares`."""
    return [self._budget(share) for share in self.shares]

  def _budget(self, share: float) -> HeadBudget:
    exact = share * self.heads / 100
    active = round(exact) if math.isfinite(exact) else 0
    if not 1 <= active <= self.heads or abs(exact - active) > _ROUNDING:
      raise ValueError(
        f"--shares {share:g} must be a whole number of the {self.heads} heads: "
        f"a multiple of {100 / self.heads:g} up to 100"
      )
    top_k = active - self.num_shared
    if top_k < 0:
      raise ValueError(
        f"--shares {share:g} is {active} of the {self.heads} heads and must be "
        f"at least the {self.num_shared} shared ones (--shared)"
      )
    return HeadBudget(self.heads, self.num_shared, top_k, self.head_dim)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """Options of `bench model`.

  Attributes:
    model: released name of the model, where no config is given.
    config: run to measure; its data need not exist, as batches are random.
    lengths: tokens of a sequence, of language models; None is 512, or the
      model's longest sequence if that is shorter.
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

  CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
    "implementations": IMPLEMENTATIONS,
    "dtype": DTYPES,
  }

  def __post_init__(self):
    check_options(self)
    self.runs()

  def runs(self) -> list[Config]:
    """Runs on random data, one for each length; the longest is the last."""
    from moh_jax.data.infer import resolve

    section = config_lib.released_model(self.model)
    if self.config:
      section = self.config.model
    run = resolve(bench_run(section, self.batch))
    changes = {"dtype": self.dtype, "remat": self.remat}
    given = {name: value for name, value in changes.items() if value}
    run = config_lib.apply_overrides(run, "model", **given)
    if self.lengths is None:
      return [run]
    return [with_length(run, n) for n in sorted(self.lengths)]

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
    data["sequence_length"] = min(_BENCH_LENGTH, model.max_length)
  if "diffusion" in model.SECTIONS:
    others["optim"] = config_lib.OptimConfig(ema_decay=_EMA_DECAY)
  return Config(model=model, data=model.DATA(**data), **others)


def with_length(config: Config, length: int) -> Config:
  """The same run on sequences of `length` tokens.

  Raises:
    ValueError: the model has one input size only, or no such length.
  """
  if not config.model.READS_TEXT:
    raise ValueError(
      f"--lengths {length} is for language models: a model of family "
      f"{config.model.family!r} reads inputs of one size"
    )
  if not 1 <= length <= config.model.max_length:
    raise ValueError(
      f"--lengths {length} must be in [1, {config.model.max_length}], the "
      "model's max_length"
    )
  return config_lib.apply_overrides(config, "data", sequence_length=length)


def check_options(options: Any) -> None:
  """Checks that counts are at least 1 and that names are known.

  Args:
    options: a dataclass; its `CHOICES` are the allowed values by field.

  Raises:
    ValueError: a value is not allowed; the message names its option.
  """
  for field in dataclasses.fields(options):
    value, known = getattr(options, field.name), options.CHOICES.get(field.name)
    flag = "--" + field.name.replace("_", "-")
    for part in value if isinstance(value, tuple) else (value,):
      if known and part is not None and part not in known:
        raise ValueError(f"{flag} {part!r} must be one of {', '.join(known)}")
      if type(part) is int and field.name != "shared" and part < 1:
        raise ValueError(f"{flag} {part} must be at least 1")


# What is timed -> its text, and the class of its options.
OPS = {
  "attention": (
    "the core alone: outputs of heads from queries, keys, values",
    HeadOptions,
  ),
  "model": ("a whole model and its multi-head baseline", ModelOptions),
}


def bench(parser: argparse.ArgumentParser) -> None:
  """Time attention, a whole model or a run's input."""
  ops = parser.add_subparsers(
    dest="op", required=True, metavar="OP", help=", ".join((*OPS, "input"))
  )
  for op, (text, cls) in OPS.items():
    sub = ops.add_parser(op, help=text, description=f"Time {text}.")
    if op == "model":
      which = sub.add_mutually_exclusive_group()
      fields.add_fields(which, cls, "model")
      common.add_config(which)
      which.add_argument(
        "--checkpoint", metavar="DIR", help=common.CHECKPOINT_HELP
      )
    names = {field.name for field in dataclasses.fields(cls)}
    fields.add_fields(sub, cls, *(names - {"model", "config"}))
    _add_shared(sub)
  text = "every stage of a run's input, and its train step"
  sub = ops.add_parser("input", help=text, description=f"Time {text}.")
  common.add_config(sub, required=True)
  common.add_count(
    sub, "--batches", 20, help="to time the input with (default: 20)"
  )
  common.add_count(
    sub, "--steps", 10, help="to time the train step with (default: 10)"
  )
  sub.add_argument(
    "--pixels",
    action="store_true",
    help="of image files, time decoding alone, evaluation's transforms and "
    "training's instead",
  )
  _add_shared(sub)


def _add_shared(parser: argparse.ArgumentParser) -> None:
  common.add_json(parser)
  parser.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )
