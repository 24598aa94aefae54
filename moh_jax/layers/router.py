"""The router of Mixture-of-Head attention: tokens to gates.

Shapes: B batch, N tokens, C width, H heads, R routed heads, S shared heads.
"""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.linear import KernelInit, normal_init
from moh_jax.layers.partitioning import declare
from moh_jax.ops import routing
from moh_jax.ops.routing import RouterAux


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadChoice:
  """Runtime overrides of a layer's head choice; parameters are unchanged.

  Attributes:
    top_k: [] int32 routed heads per token, in place of the budget's.
    order: [H] int32, the heads in the order in which the first are shared, for
      instance (4, 0, 5, 2, 1, 3) shares heads 4 and 0 where the budget shares
      two. None is 0, 1, 2, ... The recorded `Routing` lists heads in this
      order; gates are in the heads' own.
    scale: [H] or [B, 1, H] float32 that multiplies the gates, to measure what a
      head contributes.
  """

  top_k: jax.Array | None = None
  order: jax.Array | None = None
  scale: jax.Array | None = None


class HeadRouter(nn.Module):
  """Decides which heads a token uses and with what weight.

  The two-stage router has up to three bias-free matrices: `routed` [C, R]
  (W_r), `shared` [C, S] (W_s, for two or more shared heads) and `group` [C, 2]
  (W_h, where both groups are in use); "query_norm" has none. Everything is
  float32 at full matrix precision whatever the compute dtype: a rounding that
  swaps the last selected head changes the output.

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
      norms: [B, N, H] float32 norms of the queries, which the kind
        "query_norm" needs (`ops.routing.query_norms`).
      choice: runtime overrides of the budget.

    Returns:
      gates [B, N, H] float32, or None for the kind "none" (every head weighs
      one), and the side values.

    Raises:
      ValueError: the kind is "query_norm" and there are no norms.
    """
    budget, config = self.budget, self.config
    chex.assert_rank(x, 3)
    choice = HeadChoice() if choice is None else choice
    if config.kind == "none":
      gates = None
      if choice.scale is not None:
        gates = jnp.broadcast_to(choice.scale, (*x.shape[:2], budget.num_heads))
      return gates, routing.all_heads_aux(budget.num_heads)

    if config.kind == "query_norm":
      if norms is None:
        raise ValueError(
          "norms=None must be the norms [B, N, H] of the queries where the "
          "router's kind is 'query_norm'"
        )
      if choice.order is not None:
        norms = jnp.take(norms, choice.order, axis=-1)
      decided = routing.query_norm_gates(
        norms,
        budget,
        straight_through=config.straight_through,
        top_k=choice.top_k,
        top_p=config.top_p,
      )
    else:
      decided = self._two_stage(x, choice.top_k)
    self.sow("intermediates", "routing", decided)
    aux = routing.router_aux(
      decided, budget, token_mask=token_mask, form=config.gate_form
    )
    gates = decided.gates
    if choice.order is not None:
      gates = jnp.take(gates, jnp.argsort(choice.order), axis=-1)
    if choice.scale is not None:
      gates = gates * jax.lax.broadcast_to_rank(choice.scale, gates.ndim)
    return gates, aux

  def _two_stage(
    self, x: jax.Array, top_k: jax.Array | None
  ) -> routing.Routing:
    budget, config = self.budget, self.config
    sizes = {
      "routed": budget.routed if budget.top_k else 0,
      "shared": budget.shared if budget.shared > 1 else 0,
      "group": 2 if config.two_stage and budget.shared and budget.top_k else 0,
    }
    logits = self._logits(x, {n: s for n, s in sizes.items() if s})
    return routing.two_stage_gates(
      budget=budget,
      routed_logits=logits.get("routed"),
      shared_logits=logits.get("shared"),
      group_logits=logits.get("group"),
      batch_shape=x.shape[:2],
      form=config.gate_form,
      top_k=top_k,
      top_p=config.top_p,
    )

  def _logits(self, x: jax.Array, sizes: dict[str, int]) -> dict:
    """Logits [B, N, size] float32 of every matrix, all in one product."""
    if not sizes:
      return {}
    init, width = self.kernel_init(0, 1), x.shape[-1]
    # Whole on every device: to gather them would take longer than the memory is
    # worth.
    kernels = [
      declare(self, name, init, (width, size), (None, None))
      for name, size in sizes.items()
    ]
    kernel = jnp.concatenate([k.astype(jnp.float32) for k in kernels], axis=-1)
    logits = jnp.matmul(
      x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )
    bounds = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, jnp.split(logits, bounds, axis=-1)))
