"""How the heads of a layer are split, and which router chooses among them."""

import dataclasses
from typing import Literal

from moh_jax.config.base import MOST_HEADS, MOST_WIDTH, Section, Share, choices
from moh_jax.config.registry import ROUTERS, get_router


@dataclasses.dataclass(frozen=True)
class RouterConfig(Section):
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
  REGISTRIES = {"kind": ROUTERS}

  kind: str = "two_stage"
  gate_form: Literal["released", "paper"] = "released"
  two_stage: bool = True
  straight_through: Literal["selected", "all"] = "selected"
  top_p: Share = 0.0

  def check(self) -> None:
    """There are heads to select."""
    if self.top_p and self.kind == "none":
      self.fail(
        "top_p", "must be 0 for router.kind='none', which has no routed heads"
      )

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


GATE_FORMS = choices(RouterConfig, "gate_form")


@dataclasses.dataclass(frozen=True)
class HeadBudget:
  """How the heads of one layer are split; all counts are heads.

  Attributes:
    num_heads: all heads of the layer.
    shared: the first heads, on for every token.
    top_k: routed heads that each token activates.
    head_dim: width of one head.
  """

  num_heads: int
  shared: int
  top_k: int
  head_dim: int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field.name}={value!r} must be an integer")
    for name, most in (("num_heads", MOST_HEADS), ("head_dim", MOST_WIDTH)):
      if not 1 <= (value := getattr(self, name)) <= most:
        raise ValueError(f"{name}={value} must be at least 1, at most {most}")
    if not 0 <= self.shared <= self.num_heads:
      raise ValueError(
        f"shared={self.shared} must be in [0, {self.num_heads}], "
        f"the layer has num_heads={self.num_heads}"
      )
    if not 0 <= self.top_k <= self.routed:
      raise ValueError(
        f"top_k={self.top_k} must be in [0, {self.routed}]: "
        f"{self.num_heads} heads less {self.shared} shared leave "
        f"{self.routed} routed"
      )
    if self.active == 0:
      raise ValueError(
        f"shared={self.shared} and top_k={self.top_k} leave no head active; "
        "their sum must be at least 1"
      )

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
