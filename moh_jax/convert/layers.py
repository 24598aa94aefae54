"""Rules of the layers that families share: projections, mixing, router."""

from moh_jax.convert import rules
from moh_jax.convert.rules import Rule
from moh_jax.ops.routing import HeadBudget, RouterConfig


def projection_rules(
  theirs: str, ours: str, parts: int, heads: int, dim: int, bias: bool
) -> list[Rule]:
  """Linear (parts * H * D, C) to a `HeadProjection` kernel (C, parts, H, D)."""
  table = [
    rules.one(
      f"{theirs}.weight",
      f"{ours}/kernel",
      lambda w: w.T.reshape(-1, parts, heads, dim),
      lambda w: w.reshape(-1, parts * heads * dim).T,
    )
  ]
  if bias:
    table.append(
      rules.one(
        f"{theirs}.bias",
        f"{ours}/bias",
        lambda b: b.reshape(parts, heads, dim),
        lambda b: b.reshape(-1),
      )
    )
  return table


def mix_rules(theirs: str, ours: str, heads: int, dim: int) -> list[Rule]:
  """Linear (C, H * D) to a `HeadMix` kernel (H, D, C)."""
  return [
    rules.one(
      f"{theirs}.weight",
      f"{ours}/kernel",
      lambda w: w.T.reshape(heads, dim, -1),
      lambda w: w.reshape(heads * dim, -1).T,
    ),
    rules.one(f"{theirs}.bias", f"{ours}/bias"),
  ]


def router_rules(budget: HeadBudget, router: RouterConfig) -> list[Rule]:
  """Router matrices wg, wg_0 and wg_1 where the layer has them."""
  if router.kind == "none":
    return []
  present = {
    ("wg", "routed"): budget.top_k > 0,
    ("wg_0", "group"): (
      router.two_stage and budget.top_k > 0 and budget.shared > 0
    ),
    ("wg_1", "shared"): budget.shared > 1,
  }
  return [
    rules.one(
      f"{theirs}.weight", f"router/{ours}", rules.transpose, rules.transpose
    )
    for (theirs, ours), there in present.items()
    if there
  ]
