"""How the heads of a layer are split, and which router chooses among them."""

import dataclasses
from typing import Annotated, Literal

from moh_jax.config import base
from moh_jax.config.registry import ROUTERS, get_router


@dataclasses.dataclass(frozen=True)
class RouterConfig(base.Section):
  """Which router chooses a token's heads; `HeadBudget` says how many.

  Attributes:
    kind: "two_stage", a learned router; "query_norm", one without parameters
      that takes the heads with the largest queries and gates of 0 or 1;
      "none", all heads for every token (multi-head attention); or the name of a
      registered router.
    gate_form: weights of the heads as in the "released" checkpoints or as in
      the "paper", see `moh_jax.ops.routing`. "query_norm" uses it for the
      balance loss alone.
    two_stage: whether "two_stage" learns the weights (a1, a2) of the shared and
      of the routed heads; False fixes both to 1/2 (the paper's ablation, Table
      5).
    straight_through: which routed heads' scores get a gradient from the hard
      gates of "query_norm": the "selected" ones, since the score of another is
      the constant 0 in eq. 5, or "all", which needs every head's output.
    top_p: to serve a trained model: where above 0, a token selects its best
      routed heads until their scores add up to so much, in place of `top_k`.
  """

  NAME = "router"

  kind: Annotated[str, ROUTERS] = "two_stage"
  gate_form: Literal["released", "paper"] = "released"
  two_stage: bool = True
  straight_through: Literal["selected", "all"] = "selected"
  top_p: base.Share = 0.0

  def check(self) -> None:
    """There are heads to select."""
    if self.top_p and self.kind == "none":
      self.fail("top_p", "must be 0 for router.kind='none', which routes none")

  @property
  def needs_all_heads(self) -> bool:
    """Whether no head may be left out, whatever the gates.

    Without a router all are in use; gradients to all scores need the outputs of
    heads that weigh nothing.
    """
    if get_router(self.kind).straight_through:
      return self.straight_through == "all"
    return self.kind == "none"

  @property
  def reads_norms(self) -> bool:
    """Whether the router reads the norms of the queries."""
    return get_router(self.kind).reads_norms

  @property
  def varies(self) -> bool:
    """Whether a token may select more routed heads than the budget says."""
    return self.top_p > 0 or get_router(self.kind).varies


GATE_FORMS = base.choices(RouterConfig, "gate_form")


@dataclasses.dataclass(frozen=True)
class HeadBudget(base.Section):
  """How the heads of one layer are split; all counts are heads.

  Attributes:
    num_heads: all heads of the layer.
    shared: the first heads, on for every token.
    top_k: routed heads that each token activates.
    head_dim: width of one head.
  """

  NAME = ""

  num_heads: Annotated[int, base.Range(1, base.MOST_HEADS)]
  shared: base.Heads
  top_k: base.Heads
  head_dim: base.Width

  def check(self) -> None:
    """The parts are no more than the whole, and some head is active."""
    if self.shared > self.num_heads:
      self.fail("shared", f"must be in [0, {self.num_heads}], the num_heads")
    if self.top_k > self.routed:
      heads = f"{self.num_heads} heads less {self.shared} shared"
      self.fail("top_k", f"must be in [0, {self.routed}], {heads}")
    if not self.active:
      self.fail("shared", "and top_k=0 leave no head active")

  @property
  def routed(self) -> int:
    """Heads that tokens choose among."""
    return self.num_heads - self.shared

  @property
  def active(self) -> int:
    """Heads that each token uses."""
    return self.shared + self.top_k

  @property
  def share(self) -> float:
    """Activated share of the heads, in (0, 1]."""
    return self.active / self.num_heads
