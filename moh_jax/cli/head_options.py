"""Options of benchmarks of heads, such as that of attention."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Literal

from moh_jax.cli.options import Output
from moh_jax.config.base import Count, Dtype, Natural
from moh_jax.config.heads import HeadBudget
from moh_jax.config.layers import Implementation

_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(Output):
  """Time the core alone: outputs of heads from queries, keys and values.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percentages of heads that are active, such as 50 and 75.
    implementations: forms to compare with those that compute every head;
      without it every form that the device can run.
    heads: query heads, H.
    head_dim: head dim, D.
    kv_heads: key/value heads, K; without it one per query head.
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
    if self.num_shared > self.heads:
      self.fail("shared", f"must be in [0, {self.heads}], the heads")
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
