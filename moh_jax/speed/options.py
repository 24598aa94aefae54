"""Options of `bench` and `tune-kernels`, checked before any work starts.

The commands' `--help` is made from these classes, so the module imports JAX
only where an option is checked against the device.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.config.base import DTYPES
from moh_jax.config.heads import HeadBudget
from moh_jax.config.layers import IMPLEMENTATIONS

# Forms that can compute every head as well: the baselines of the others.
_EVERY_HEAD = ("dense", "auto", "cudnn", "kernel")
MODES = ("forward", "forward_backward", "causal", "causal_forward_backward")
_BENCH_LENGTH = 512  # tokens, where `bench --lengths` is not given
_EMA_DECAY = 0.9999  # of the released recipe of diffusion models
_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number


@dataclasses.dataclass(frozen=True)
class HeadOptions:
  """Options of every benchmark of heads: attention, layer and decode.

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

  CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
    "implementations": IMPLEMENTATIONS,
    "dtype": DTYPES,
  }

  def __post_init__(self):
    _check(self, "lengths", "heads", "head_dim", "kv_heads", "batch", "rounds")
    if self.heads % self.num_kv_heads:
      raise ValueError(
        f"--kv-heads {self.kv_heads} must divide --heads {self.heads}"
      )
    if not 0 <= self.num_shared <= self.heads:
      raise ValueError(
        f"--shared {self.shared} must be in [0, {self.heads}], the heads"
      )
    self.budgets()
    for name in self.implementations or ():
      self.check_possible(name)

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

  @functools.cached_property
  def compared(self) -> tuple[str, ...]:
    """Forms to compare; by default all possible ones but "dense"."""
    names = self.implementations
    if names is None:
      names = (name for name in self._possible if name != "dense")
    return tuple(dict.fromkeys(names))

  @functools.cached_property
  def baselines(self) -> tuple[str, ...]:
    """Forms that compute every head on the device, "dense" first."""
    return tuple(name for name in _EVERY_HEAD if name in self._possible)

  @functools.cached_property
  def _possible(self) -> tuple[str, ...]:
    """Every form that the device can run."""
    return tuple(filter(self._is_possible, self.CHOICES["implementations"]))

  def check_possible(self, implementation: str) -> None:
    """Raises ValueError if the device cannot run a form of attention."""
    from moh_jax.ops.target import target

    if implementation in ("kernel", "cudnn") and target().platform == "cpu":
      raise ValueError(
        f"--implementations {implementation} needs an accelerator, this is a "
        "CPU"
      )

  def _is_possible(self, implementation: str) -> bool:
    try:
      self.check_possible(implementation)
    except (ValueError, RuntimeError):  # RuntimeError: there is no cuDNN
      return False
    return True


@dataclasses.dataclass(frozen=True)
class SequenceOptions(HeadOptions):
  """Options of benchmarks on sequences: attention and layer.

  Attributes:
    modes: passes to run.
  """

  modes: tuple[str, ...] = ("forward", "forward_backward", "causal")

  CHOICES: ClassVar = {**HeadOptions.CHOICES, "modes": MODES}

  def check_possible(self, implementation: str) -> None:
    """Raises ValueError if the device or the shapes rule out a form."""
    super().check_possible(implementation)
    for length in self.lengths:
      for causal in {"causal" in mode for mode in self.modes}:
        self._trace(implementation, length, causal)

  def _trace(self, implementation: str, length: int, causal: bool) -> None:
    """Traces attention, which raises what compiling it would raise."""
    import jax

    from moh_jax.ops.attention import attention
    from moh_jax.ops.head_blocks import ActiveHeads

    shape = (self.batch, length, self.heads)
    active = ActiveHeads(
      jax.ShapeDtypeStruct(shape, bool), self.budgets()[0].active
    )
    q = jax.ShapeDtypeStruct((*shape, self.head_dim), self.dtype)
    groups = (*shape[:2], self.num_kv_heads, self.head_dim)
    k = jax.ShapeDtypeStruct(groups, self.dtype)
    attend = functools.partial(
      attention, causal=causal, implementation=implementation
    )
    jax.eval_shape(attend, q, k, k, active=active)


@dataclasses.dataclass(frozen=True)
class LayerOptions(SequenceOptions):
  """Options of `bench layer`.

  Attributes:
    width: width of the tokens, C; None is heads * head_dim.
  """

  width: int | None = None

  def __post_init__(self):
    _check(self, "width")
    super().__post_init__()

  @property
  def features(self) -> int:
    """Width of the tokens, C."""
    return self.heads * self.head_dim if self.width is None else self.width


@dataclasses.dataclass(frozen=True)
class DecodeOptions(HeadOptions):
  """Options of `bench decode`; `lengths` counts the slots of the cache.

  Attributes:
    cache_dtype: dtype of the cached keys and values; None is the compute dtype.
  """

  lengths: tuple[int, ...] = (1024, 4096)
  cache_dtype: str | None = None

  modes: ClassVar = ("decode",)
  # "dense" reads the cache for every head, "kernel" for active heads only.
  CHOICES: ClassVar = {
    **HeadOptions.CHOICES,
    "implementations": ("dense", "kernel"),
    "cache_dtype": config_lib.CACHE_DTYPES,
  }

  def check_possible(self, implementation: str) -> None:
    """Raises ValueError if the device or the heads rule out a form."""
    super().check_possible(implementation)
    if implementation != "kernel":
      return
    from moh_jax.ops.attention_forms import kernel_options
    from moh_jax.ops.kernels.sizes import decode_tile
    from moh_jax.ops.target import target

    backend = kernel_options(target())["backend"]
    try:
      decode_tile(backend, self.head_dim, self.dtype)
    except ValueError as error:
      raise ValueError(
        f"--head-dim {self.head_dim} is not for --implementations kernel: "
        f"{error}"
      ) from error


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

  CHOICES: ClassVar = HeadOptions.CHOICES

  def __post_init__(self):
    _check(self, "lengths", "batch", "sampler_steps", "rounds")
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


@dataclasses.dataclass(frozen=True)
class Workload:
  """Shapes of the attention that tiles are measured on.

  Attributes:
    batch: sequences, B.
    tokens: tokens of a sequence, N; there are as many keys.
    heads: query heads, H; there are as many key/value heads.
    active: active heads of a token, sampled at random.
    head_dim: head dim, D.
    dtype: dtype of all inputs.
    causal: whether a token sees no later keys.
    rounds: measured turns.

  Raises:
    ValueError: a field is out of range; the message names it.
  """

  batch: int = 8
  tokens: int = 1024
  heads: int = 16
  active: int = 8
  head_dim: int = 64
  dtype: str = "bfloat16"
  causal: bool = False
  rounds: int = 20

  CHOICES: ClassVar = {"dtype": ("bfloat16", "float16", "float32")}

  def __post_init__(self):
    from moh_jax.ops.kernels.sizes import MAX_HEAD_DIM

    _check(self, "batch", "tokens", "heads", "rounds")
    if not 1 <= self.active <= self.heads:
      raise ValueError(
        f"--active {self.active} must be in [1, {self.heads}], the heads"
      )
    if not 1 <= self.head_dim <= MAX_HEAD_DIM:
      raise ValueError(
        f"--head-dim {self.head_dim} must be in [1, {MAX_HEAD_DIM}]"
      )


def _check(options: Any, *counts: str) -> None:
  """Checks that counts are at least 1 and that names are known.

  Args:
    options: a dataclass; its `CHOICES` are the allowed values by field.
    *counts: fields that hold a number or numbers, or None.

  Raises:
    ValueError: a value is not allowed; the message names its option.
  """
  for name in counts:
    for value in _values(options, name):
      if value < 1:
        raise ValueError(f"{_flag(name)} {value} must be at least 1")
  for name, known in options.CHOICES.items():
    for value in _values(options, name):
      if value not in known:
        raise ValueError(
          f"{_flag(name)} {value!r} must be one of {', '.join(known)}"
        )


def _values(options: Any, name: str) -> tuple:
  value = getattr(options, name)
  if value is None:
    return ()
  return value if isinstance(value, tuple) else (value,)


def _flag(option: str) -> str:
  return "--" + option.replace("_", "-")


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
