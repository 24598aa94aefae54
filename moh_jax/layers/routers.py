"""The kinds of routers: how tokens or queries become a `Routing`.

`HeadRouter` does what all kinds have in common. A kind of another package is
registered with `moh_jax.register_router`.

Shapes: B batch, N tokens, C width, H heads, R routed heads, S shared heads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.linear import KernelInit, normal_init
from moh_jax.layers.partitioning import declare
from moh_jax.ops import routing
from moh_jax.ops.routing import Routing


class Router(nn.Module):
  """A kind of router: subclass it and define `__call__`.

  Parameters lie directly under the layer's router: `self.param("bias", ...)` is
  `attn/router/bias`. In training `self.make_rng("dropout")` gives random keys;
  `self.has_rng("dropout")` tells whether there is one.

  Attributes:
    budget: the layer's head split.
    config: section `model.router`.
    kernel_init: the family's initializer of matrices.
  """

  budget: HeadBudget
  config: RouterConfig = RouterConfig()
  kernel_init: KernelInit = normal_init

  def __call__(
    self,
    x: jax.Array,
    *,
    norms: jax.Array | None = None,
    top_k: jax.Array | None = None,
  ) -> Routing:
    """Decides for each token; override it.

    Args:
      x: [B, N, C] the tokens that the attention reads.
      norms: [B, N, H] float32 norms of the queries, the shared heads first,
        where the kind reads them.
      top_k: [] int32 routed heads per token in place of the budget's.

    Returns:
      Gates [B, N, H] float32, exactly 0 for heads that are not selected, and
      what the balance loss and the statistics need.
    """
    raise NotImplementedError(f"{type(self).__name__} has no __call__")

  def logits(self, x: jax.Array, **sizes: int) -> dict[str, jax.Array]:
    """Products with bias-free matrices [C, size], all in one.

    Float32 at full matrix precision whatever the compute dtype: a rounding
    that swaps the last selected head changes the output.

    Args:
      x: [B, N, C] tokens.
      **sizes: columns of each matrix, by its name; 0 makes no matrix.

    Returns:
      [B, N, size] float32 by name.
    """
    init, width = self.kernel_init(0, 1), x.shape[-1]
    # Whole on every device: to gather them would take longer than the memory is
    # worth.
    kernels = [
      declare(self, name, init, (width, size), (None, None))
      for name, size in sizes.items()
      if size
    ]
    if not kernels:
      return {name: jnp.zeros((*x.shape[:2], 0), jnp.float32) for name in sizes}
    kernel = jnp.concatenate([k.astype(jnp.float32) for k in kernels], axis=-1)
    logits = jnp.matmul(
      x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )
    bounds = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, jnp.split(logits, bounds, axis=-1)))

  @nn.nowrap
  def select(
    self, scores: jax.Array, probs: jax.Array, top_k: jax.Array | None
  ) -> jax.Array:
    """Marks the heads with the best scores, as many as budget and config say.

    Args:
      scores: [B, N, R].
      probs: [B, N, R] scores that add up to 1, for `RouterConfig.top_p`.
      top_k: as `__call__` gets it.

    Returns:
      [B, N, R] bool.
    """
    how = {"top_k": top_k, "top_p": self.config.top_p}
    return routing.select_heads(scores, probs, self.budget, **how)

  @nn.nowrap
  def routing(
    self, gates: jax.Array, probs: jax.Array, selected: jax.Array
  ) -> Routing:
    """A `Routing` in which the shared heads weigh one.

    Args:
      gates: [B, N, R] float32 of the routed heads, 0 where not selected.
      probs: [B, N, R] float32 scores that the balance loss reads; they add up
        to 1.
      selected: [B, N, R] bool.
    """
    return routing.beside_shared(self.budget, gates, probs, selected)


class TwoStageRouter(Router):
  """The paper's learned router, in the forms of `moh_jax.ops.routing`.

  It has up to three matrices: `routed` [C, R] (W_r), `shared` [C, S] (W_s, for
  two or more shared heads) and `group` [C, 2] (W_h, where both groups are in
  use).
  """

  @staticmethod
  def matrices(budget: HeadBudget, config: RouterConfig) -> dict[str, int]:
    """Columns of each matrix that a layer has."""
    sizes = {
      "routed": budget.routed if budget.top_k else 0,
      "shared": budget.shared if budget.shared > 1 else 0,
      "group": 2 if config.two_stage and budget.shared and budget.top_k else 0,
    }
    return {name: size for name, size in sizes.items() if size}

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    logits = self.logits(x, **self.matrices(self.budget, self.config))
    return routing.two_stage_gates(
      budget=self.budget,
      routed_logits=logits.get("routed"),
      shared_logits=logits.get("shared"),
      group_logits=logits.get("group"),
      batch_shape=x.shape[:2],
      form=self.config.gate_form,
      top_k=top_k,
      top_p=self.config.top_p,
    )


class QueryNormRouter(Router):
  """The paper's router of pre-trained models; it has no parameters."""

  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    return routing.query_norm_gates(
      norms,
      self.budget,
      straight_through=self.config.straight_through,
      top_k=top_k,
      top_p=self.config.top_p,
    )
