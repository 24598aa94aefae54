"""Head splits of models whose layers form one stack."""

import dataclasses
from typing import Any

from moh_jax.ops.routing import HeadBudget, RouterConfig


@dataclasses.dataclass(frozen=True)
class LayerRun:
  """Consecutive layers with the same head split; a model scans each run.

  Attributes:
    budget: the split.
    depth: layers in the run.
  """

  budget: HeadBudget
  depth: int


@dataclasses.dataclass(frozen=True)
class LayerGroup:
  """Equal layers of a model, for reports.

  Attributes:
    budget: the head split.
    depth: layers.
    width: C.
    tokens: N, of a text the longest.
    sees: what a token attends to: "all" tokens, those "before" it, or a
      "window" and pooled tokens.
  """

  budget: HeadBudget
  depth: int
  width: int
  tokens: int
  sees: str = "all"


class LayerStack:
  """What model sections with one value per layer have in common.

  Their fields `num_heads`, `shared_heads` and `top_k` are tuples of one value
  per layer; `head_dim`, `width`, `router`, `gate_form` and `two_stage` hold for
  all. `num_tokens` is the N of every layer, `sees` as in `LayerGroup`.
  """

  sees = "all"

  @property
  def depth(self) -> int:
    """Layers."""
    return len(self.num_heads)

  @property
  def router_config(self) -> RouterConfig:
    """The router's kind and form."""
    return RouterConfig(self.router, self.gate_form, self.two_stage)

  def check_layers(self) -> None:
    """Checks the head splits and the router.

    Raises:
      ValueError: a tuple of another length, or a split that does not add up.
    """
    if not self.num_heads:
      raise ValueError("model.num_heads=() must have at least one layer")
    for name in ("shared_heads", "top_k"):
      values = getattr(self, name)
      if len(values) != self.depth:
        raise ValueError(
          f"model.{name}={values} must have one value per layer, as "
          f"model.num_heads={self.num_heads} has ({self.depth})"
        )
    self.router_config  # noqa: B018  (checks itself)
    self.budgets()

  def budgets(self) -> tuple[HeadBudget, ...]:
    """The head split of every layer.

    Raises:
      ValueError: a split that does not add up, with its layer.
    """
    budgets = []
    splits = zip(self.num_heads, self.shared_heads, self.top_k)
    for layer, (heads, shared, top_k) in enumerate(splits):
      try:
        budgets.append(HeadBudget(heads, shared, top_k, self.head_dim))
      except ValueError as error:
        raise ValueError(f"model, layer {layer}: {error}") from error
    return tuple(budgets)

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The layers by groups of equal ones, in order."""
    return tuple(
      LayerGroup(run.budget, run.depth, self.width, self.num_tokens, self.sees)
      for run in self.runs()
    )

  def runs(self) -> tuple[LayerRun, ...]:
    """The layers as runs of equal ones, in order."""
    runs: list[LayerRun] = []
    for budget in self.budgets():
      if runs and runs[-1].budget == budget:
        runs[-1] = LayerRun(budget, runs[-1].depth + 1)
      else:
        runs.append(LayerRun(budget, 1))
    return tuple(runs)


def activated_share(model: Any) -> float:
  """Heads that a token uses over all heads, all layers together.

  Args:
    model: the model section of any family.
  """
  if model.router == "none":
    return 1.0
  groups = model.layer_groups()
  active = sum(group.depth * group.budget.active for group in groups)
  return active / sum(group.depth * group.budget.num_heads for group in groups)
