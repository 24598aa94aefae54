"""Options of the `bench` commands, checked before any work starts."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import jax

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention
from moh_jax.ops.head_blocks import ActiveHeads

# Forms that compute every head: the baselines of the others.
DENSE_FORMS = ("dense", "cudnn")
MODES = ("forward", "forward_backward", "causal", "causal_forward_backward")
_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number


@dataclasses.dataclass(frozen=True)
class HeadOptions:
  """Options of every benchmark of heads: attention, layer and decode.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percentages of heads that are active, such as 50 and 75.
    implementations: forms to compare beside "dense"; None is every form that
      the device can run.
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

  known_implementations: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS

  def __post_init__(self):
    for name in ("heads", "head_dim", "batch", "rounds"):
      check_at_least_1(name, [getattr(self, name)])
    check_at_least_1("lengths", self.lengths)
    if self.kv_heads is not None:
      check_at_least_1("kv_heads", [self.kv_heads])
      if self.heads % self.kv_heads:
        raise ValueError(
          f"--kv-heads {self.kv_heads} must divide --heads {self.heads}"
        )
    if not 0 <= self.num_shared <= self.heads:
      raise ValueError(
        f"--shared {self.shared} must be in [0, {self.heads}], the heads"
      )
    self.budgets()
    check_names(
      "implementations", self.implementations or (), self.known_implementations
    )
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
    """Forms to compare: "dense", then the others."""
    names = self.implementations
    if names is None:
      names = filter(self._is_possible, self.known_implementations)
    return tuple(dict.fromkeys(("dense", *names)))

  def check_possible(self, implementation: str) -> None:
    """Raises ValueError if the device cannot run a form of attention."""
    if implementation in ("kernel", "cudnn") and jax.default_backend() == "cpu":
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
    modes: passes to run, of `MODES`.
  """

  modes: tuple[str, ...] = ("forward", "forward_backward", "causal")

  def __post_init__(self):
    check_names("modes", self.modes, MODES)
    super().__post_init__()

  def check_possible(self, implementation: str) -> None:
    """Raises ValueError if the device or the shapes rule out a form."""
    super().check_possible(implementation)
    for length in self.lengths:
      for causal in {"causal" in mode for mode in self.modes}:
        self._trace(implementation, length, causal)

  def _trace(self, implementation: str, length: int, causal: bool) -> None:
    """Traces attention, which raises what compiling it would raise."""
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


def check_at_least_1(option: str, values: Sequence[int]) -> None:
  """Checks that numbers are at least 1.

  Args:
    option: name of the field, such as "head_dim".
    values: its numbers.

  Raises:
    ValueError: one is below 1.
  """
  for value in values:
    if value < 1:
      raise ValueError(f"{_flag(option)} {value} must be at least 1")


def check_names(
  option: str, names: Sequence[str], known: Sequence[str]
) -> None:
  """Checks that names are known.

  Args:
    option: name of the field, such as "cache_dtype".
    names: names to check.
    known: allowed names.

  Raises:
    ValueError: one is unknown.
  """
  for name in names:
    if name not in known:
      raise ValueError(
        f"{_flag(option)} {name!r} must be one of {', '.join(known)}"
      )


def _flag(option: str) -> str:
  return "--" + option.replace("_", "-")
