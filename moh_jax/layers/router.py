"""The router of Mixture-of-Head attention: tokens to gates.

Shapes: B batch, N tokens, C width, H heads.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.registry import get_router, imported
from moh_jax.layers.linear import KernelInit, normal_init
from moh_jax.ops import routing
from moh_jax.ops.routing import RouterAux, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadChoice:
  """Runtime overrides of a layer's head choice; parameters are unchanged.

  Attributes:
    top_k: [] int32 routed heads per token, in place of the budget's.
    order: [H] int32, the heads in the order in which the first are shared, for
      instance (4, 0, 5, 2, 1, 3) shares heads 4 and 0 where the budget shares
      two. None is 0, 1, 2, ... The recorded `Routing` lists heads in this
      order; gates and side values are in the heads' own.
    scale: [H] or [B, 1, H] float32 that multiplies the gates, to measure what a
      head contributes.
  """

  top_k: jax.Array | None = None
  order: jax.Array | None = None
  scale: jax.Array | None = None


class HeadRouter(nn.Module):
  """Decides which heads a token uses and with what weight.

  It calls the module of its kind (`moh_jax.layers.routers`), whose parameters
  are its own, and does what all kinds have in common: the balance loss, the
  statistics and the runtime overrides.

  Under `mutable=["intermediates"]` the layer records a `Routing`, "routing".

  Attributes:
    budget: the layer's head split.
    config: the kind and form of the router.
    kernel_init: initializer of the matrices.
  """

  budget: HeadBudget
  config: RouterConfig = RouterConfig()
  kernel_init: KernelInit = normal_init

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    norms: jax.Array | None = None,
    choice: HeadChoice | None = None,
  ) -> tuple[jax.Array | None, RouterAux]:
    """Routes tokens.

    Args:
      x: [B, N, C] the tokens that the attention reads.
      token_mask: [B, N] bool, True for the tokens that the balance loss and
        the statistics count; None counts all.
      norms: [B, N, H] float32 norms of the queries (`ops.routing.query_norms`),
        where `config.reads_norms`.
      choice: runtime overrides of the budget.

    Returns:
      gates [B, N, H] float32, or None for the kind "none" (every head weighs
      one), and the side values.

    Raises:
      ValueError: the kind reads norms and there are none, or a registered
        router returned arrays of other shapes.
    """
    budget, config = self.budget, self.config
    chex.assert_rank(x, 3)
    choice = HeadChoice() if choice is None else choice
    if config.kind == "none":
      gates = None
      if choice.scale is not None:
        gates = jnp.broadcast_to(choice.scale, (*x.shape[:2], budget.num_heads))
      return gates, routing.all_heads_aux(budget.num_heads)

    if config.reads_norms and norms is None:
      raise ValueError(
        "norms=None must be the norms [B, N, H] of the queries where the "
        f"router's kind is {config.kind!r}"
      )
    if norms is not None and choice.order is not None:
      norms = jnp.take(norms, choice.order, axis=-1)
    module = imported(get_router(config.kind).module)
    router = module(budget, config, self.kernel_init)
    nn.share_scope(self, router)  # parameters lie directly under this layer
    decided = router(x, norms=norms, top_k=choice.top_k)
    self._check(decided, x)
    self.sow("intermediates", "routing", decided)
    aux = routing.router_aux(
      decided, budget, token_mask=token_mask, form=config.gate_form
    )
    gates = decided.gates
    if choice.order is not None:
      own = jnp.argsort(choice.order)
      values = gates, aux.load, aux.mean_score
      gates, load, score = (jnp.take(x, own, axis=-1) for x in values)
      aux = dataclasses.replace(aux, load=load, mean_score=score)
    if choice.scale is not None:
      gates = gates * jax.lax.broadcast_to_rank(choice.scale, gates.ndim)
    return gates, aux

  @nn.nowrap
  def _check(self, decided: Routing, x: jax.Array) -> None:
    """Refuses shapes that later sums would broadcast."""
    budget = self.budget
    sizes = {
      "gates": budget.num_heads,
      "probs": budget.routed,
      "selected": budget.routed,
      "shared_scores": budget.shared,
      "groups": 2,
    }
    for name, size in sizes.items():
      shape, expected = getattr(decided, name).shape, (*x.shape[:2], size)
      if shape != expected:
        raise ValueError(
          f"router.kind={self.config.kind!r} returned {name} of shape {shape}, "
          f"must be {expected}"
        )


@contextlib.contextmanager
def count_examples(mask: jax.Array) -> Iterator[None]:
  """Makes models that are applied inside count some of their examples alone.

  It is for side values (`RouterAux`) of batches with padding; outputs do not
  change.

  Args:
    mask: [B], 0 for examples that do not count.
  """

  def route(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    is_router = isinstance(context.module, HeadRouter) and args
    if is_router and len(args[0]) == len(mask):
      x, given = (*args, kwargs.pop("token_mask", None))[:2]
      counted = jnp.broadcast_to(mask[:, None] > 0, x.shape[:2])
      args = x, counted if given is None else counted & given
    return call(*args, **kwargs)

  with nn.intercept_methods(route):
    yield
