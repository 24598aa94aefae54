"""Conversion rules of layers that families share: projections, mix, router."""

from collections.abc import Callable, Mapping

from moh_jax.config import LayerStack
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.rules import Rule
from moh_jax.layers.routers import TwoStageRouter

# Router matrices in the releases of ViT and DiT.
_ROUTER_NAMES = {"routed": "wg", "group": "wg_0", "shared": "wg_1"}
# Router kinds of public checkpoints, with the matrices that a layer has.
_MATRICES = {
  "two_stage": TwoStageRouter.matrices,
  "query_norm": lambda budget, router: (),
  "none": lambda budget, router: (),
}


def projection_rules(
  theirs: str, ours: str, parts: int, heads: int, dim: int, bias: bool
) -> list[Rule]:
  """Linear (parts * H * D, C) to a `HeadProjection` kernel (C, parts, H, D)."""
  return rules.linear(
    theirs,
    ours,
    bias=bias,
    kernel_maps=rules.reshaped_kernel(
      (-1, parts, heads, dim), (-1, parts * heads * dim)
    ),
    bias_maps=rules.reshaped((parts, heads, dim), (-1,)),
  )


def split_projection_rules(
  theirs: tuple[str, ...], ours: str, heads: int, *, dim: int, bias: bool
) -> list[Rule]:
  """Linears (H * D, C), one a part, to a `HeadProjection` (C, parts, H, D)."""
  parts = [
    rules.linear(
      name,
      ours,
      bias=bias,
      kernel_maps=rules.reshaped_kernel((-1, heads, dim), (-1, heads * dim)),
      bias_maps=rules.reshaped((heads, dim), (-1,)),
    )
    for name in theirs
  ]
  axes = (1, 0)  # of the parts in the kernel, and in the bias if there is one
  return [rules.joined(same, axis) for same, axis in zip(zip(*parts), axes)]


def patch_rules(theirs: str, patch: int, channels: int) -> list[Rule]:
  """Convolution of patches (C, channels, p, p) to `patch` (p * p * c, C)."""
  return rules.linear(
    theirs,
    "patch",
    kernel_maps=(
      lambda w: w.transpose(2, 3, 1, 0).reshape(-1, w.shape[0]),
      lambda w: w.reshape(patch, patch, channels, -1).transpose(3, 2, 0, 1),
    ),
  )


def mix_rules(
  theirs: str, ours: str, heads: int, dim: int, bias: bool = True
) -> list[Rule]:
  """Linear (C, H * D) to a `HeadMix` kernel (H, D, C)."""
  maps = rules.reshaped_kernel((heads, dim, -1), (heads * dim, -1))
  return rules.linear(theirs, ours, bias=bias, kernel_maps=maps)


def router_rules(
  budget: HeadBudget,
  router: RouterConfig,
  names: Mapping[str, str] = _ROUTER_NAMES,
) -> list[Rule]:
  """Rules of the router matrices that a layer has.

  Args:
    budget: the layer's head split.
    router: its router.
    names: public names of the matrices "routed", "group" and "shared".

  Raises:
    ValueError: no public checkpoint has such a router.
  """
  if router.kind not in _MATRICES:
    raise ValueError(
      f"model.router.kind={router.kind!r} must be one of {tuple(_MATRICES)}: "
      "public checkpoints have no other router"
    )
  return [
    rules.one(f"{names[ours]}.weight", f"router/{ours}", rules.TRANSPOSED)
    for ours in _MATRICES[router.kind](budget, router)
  ]


def stack_rules(
  config: LayerStack,
  block: Callable[[HeadBudget], list[Rule]],
  theirs: str,
) -> list[Rule]:
  """Rules of all layers, each in the run of equal ones that holds it.

  Args:
    config: the model.
    block: rules of a layer by its head split.
    theirs: what precedes a layer's names, with {layer} for its number.
  """
  table, first = [], 0
  for index, group in enumerate(config.layer_groups()):
    layers = range(first, first + group.depth)
    first += group.depth
    ours = (f"blocks{index}",)
    table += rules.stacked(block(group.budget), theirs, ours, layers)
  return table
