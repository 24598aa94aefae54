"""What `bench` was asked for, checked before any work."""

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

# Forms that compute every head: what the others are measured by.
DENSE_FORMS = ("dense", "cudnn")
MODES = ("forward", "forward_backward", "causal", "causal_forward_backward")
_WHOLE = 0.01  # heads that a rounded percentage may be off


@dataclasses.dataclass(frozen=True)
class HeadOptions:
  """What all comparisons of heads share.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percent of the heads that are at work.
    implementations: what is compared, beside "dense"; None is all that the
      device can do.
    heads: H.
    head_dim: D.
    kv_heads: K; None is one per query head.
    shared: heads that are always on; None is a quarter.
    batch: B.
    dtype: compute dtype.
    rounds: measured turns.

  Raises:
    ValueError: an option is out of range; its text names it.
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
    """K."""
    return self.heads if self.kv_heads is None else self.kv_heads

  @property
  def num_shared(self) -> int:
    """Heads that are always on."""
    return self.heads // 4 if self.shared is None else self.shared

  def budgets(self) -> list[HeadBudget]:
    """The head split of every share."""
    return [self._budget(share) for share in self.shares]

  def _budget(self, share: float) -> HeadBudget:
    exact = share * self.heads / 100
    active = round(exact) if math.isfinite(exact) else 0
    if not 1 <= active <= self.heads or abs(exact - active) > _WHOLE:
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
    """Implementations that run: "dense", then the others."""
    if self.implementations is not None:
      names = self.implementations
    else:
      names = [n for n in self.known_implementations if self._is_possible(n)]
    return tuple(dict.fromkeys(("dense", *names)))

  def check_possible(self, implementation: str) -> None:
    """Raises a ValueError where the device or the shapes rule one out."""
    if implementation in ("kernel", "cudnn") and jax.default_backend() == "cpu":
      raise ValueError(
        f"--implementations {implementation} needs an accelerator, this is a "
        "CPU"
      )

  def _is_possible(self, implementation: str) -> bool:
    try:
      self.check_possible(implementation)
    except (ValueError, RuntimeError):  # the latter: there is no cuDNN at all
      return False
    return True


@dataclasses.dataclass(frozen=True)
class SequenceOptions(HeadOptions):
  """Of attention among the tokens of a sequence.

  Attributes:
    modes: of `MODES`.
  """

  modes: tuple[str, ...] = ("forward", "forward_backward", "causal")

  def __post_init__(self):
    check_names("modes", self.modes, MODES)
    super().__post_init__()

  def check_possible(self, implementation: str) -> None:
    """Raises a ValueError where the device or the shapes rule one out."""
    super().check_possible(implementation)
    for length in self.lengths:
      for causal in {"causal" in mode for mode in self.modes}:
        self._trace(implementation, length, causal)

  def _trace(self, implementation: str, length: int, causal: bool) -> None:
    """Does all of attention but to compile and to run it."""
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
  """Refuses numbers below 1.

  Args:
    option: field that holds them.
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
  """Refuses unknown names.

  Args:
    option: field that holds them.
    names: what was given.
    known: what may be.

  Raises:
    ValueError: one is not known.
  """
  for name in names:
    if name not in known:
      raise ValueError(
        f"{_flag(option)} {name!r} must be one of {', '.join(known)}"
      )


def _flag(option: str) -> str:
  return "--" + option.replace("_", "-")
