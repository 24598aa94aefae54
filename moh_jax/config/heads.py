"""How the heads of a layer are split, and which router chooses among them."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from moh_jax.config import base
from moh_jax.config.registry import ROUTERS, get_router

Structure = Literal["free", "per_group", "whole_group"]


@dataclasses.dataclass(frozen=True)
class RouterConfig(base.Section):
  """Which router chooses a token's heads; `HeadBudget` says how many.

  Attributes:
    kind: "two_stage", a learned router; "query_norm", one without parameters
      that takes the heads with the largest queries and gates of 0 or 1;
      "none", all heads for every token (multi-head attention); "gate", all
      heads, each weighed by a learned sigmoid (arXiv:2505.06708); "timestep",
      in diffusion, a learned router that reads the step alone and has gates of
      0 or 1, so that sampling computes no other heads (as in arXiv:2410.03456);
      or the name of a registered router.
    gate_form: weights of the heads as in the "released" checkpoints or as in
      the "paper", see `moh_jax.ops.routing`. "query_norm" uses it for the
      balance loss alone.
    two_stage: whether "two_stage" learns the weights (a1, a2) of the shared and
      of the routed heads; False fixes both to 1/2 (the paper's ablation, Table
      5).
    straight_through: which routed heads' scores get a gradient from hard gates
      ("query_norm", "timestep"): the "selected" ones, since the score of
      another is the constant 0 in eq. 5, or "all", which needs every head's
      output.
    structure: which choices tokens have where several query heads share keys
      and values. "free": any `top_k` of the routed heads (MoH). "per_group":
      shared and routed heads are counted within each key/value group, and a
      token selects as many of each group (as in arXiv:2606.20945).
      "whole_group": a group with all of its query heads is shared, or selected
      as one, and has one gate. Budgets count heads in all of them.
  """

  NAME = "router"

  kind: Annotated[str, ROUTERS] = "two_stage"
  gate_form: Literal["released", "paper"] = "released"
  two_stage: bool = True
  straight_through: Literal["selected", "all"] = "selected"
  structure: Structure = "free"

  @property
  def selects(self) -> bool:
    """Whether tokens select heads; else every head is on for all of them."""
    kind = get_router(self.kind)
    return kind.selects and kind.module is not None

  @property
  def needs_all_heads(self) -> bool:
    """Whether no head may be left out, whatever the gates.

    Without a router all are in use; gradients to all scores need the outputs of
    heads that weigh nothing.
    """
    if get_router(self.kind).straight_through:
      return self.straight_through == "all"
    return not self.selects

  @property
  def reads_norms(self) -> bool:
    """Whether the router reads the norms of the queries."""
    return get_router(self.kind).reads_norms

  @property
  def reads_time(self) -> bool:
    """Whether the router reads the embedding of the diffusion step."""
    return get_router(self.kind).reads_time

  @property
  def varies(self) -> bool:
    """Whether a token may select more routed heads than the budget says."""
    return get_router(self.kind).varies


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

  num_heads: base.Count
  shared: base.Natural
  top_k: base.Natural
  head_dim: base.Count

  def check(self) -> None:
    """The counts fit into one another, and some head is active."""
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


@dataclasses.dataclass(frozen=True)
class Units:
  """What the router of a layer chooses among, see `RouterConfig.structure`.

  Attributes:
    budget: the layer's head split, counted in units.
    size: heads of a unit.
    parts: groups of equally many units, each with as many shared and selected.
  """

  budget: HeadBudget
  size: int = 1
  parts: int = 1

  @classmethod
  def of(
    cls, budget: HeadBudget, router: RouterConfig, kv_heads: int | None
  ) -> "Units":
    """The units of a layer.

    Args:
      budget: the layer's head split.
      router: the kind and structure of the router.
      kv_heads: K; None or 0 is one per query head.

    Raises:
      ValueError: the structure is impossible with these numbers.
    """
    groups = kv_heads or budget.num_heads
    size, rest = divmod(budget.num_heads, groups)
    if rest:
      several = f"must be a multiple of {groups} key/value heads"
      budget.fail("num_heads", several)
    if not router.selects:
      return cls(dataclasses.replace(budget, shared=budget.num_heads, top_k=0))
    if router.structure == "free":
      return cls(budget)
    if router.structure == "whole_group":
      divisor, what = size, f"the {size} heads of a key/value group"
    elif size > 1:
      divisor, what = groups, f"the {groups} key/value groups"
    else:
      more = f"needs more query heads than the {groups} key/value heads"
      router.fail("structure", more)
    counts = {}
    for name in ("shared", "top_k"):
      counts[name], rest = divmod(getattr(budget, name), divisor)
      if rest:
        structure = f"router.structure={router.structure!r}"
        budget.fail(name, f"must be a multiple of {what} for {structure}")
    if router.structure == "per_group":
      return cls(budget, parts=groups)
    return cls(HeadBudget(groups, **counts, head_dim=budget.head_dim), size)

  @property
  def step(self) -> int:
    """Heads that a budget of the layer counts together."""
    return self.size * self.parts

  def order(self, preferred: Sequence[int] = ()) -> tuple[int, ...]:
    """The heads as the router lists them: the shared ones, then the others.

    Both run from part to part, and the heads of a unit are side by side.

    Args:
      preferred: the heads in the order in which the first of each part are
        shared; () is their own. Units of several heads are ordered by the mean
        place of these.
    """
    heads = list(preferred or range(self.budget.num_heads * self.size))
    if self.size > 1:
      places: dict[int, int] = collections.Counter()
      for place, head in enumerate(heads):
        places[head // self.size] += place
      heads.sort(key=lambda x: (places[x // self.size], x))
    part = len(heads) // self.parts
    shared = self.budget.shared * self.size // self.parts
    by_part = [
      [head for head in heads if head // part == index]
      for index in range(self.parts)
    ]
    lists = [x[:shared] for x in by_part] + [x[shared:] for x in by_part]
    return tuple(itertools.chain.from_iterable(lists))
