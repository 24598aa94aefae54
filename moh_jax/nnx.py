"""MoH attention for models in Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moh_jax.config.heads import HeadBudget
from moh_jax.layers import moh
from moh_jax.ops.routing import RouterAux


class MoHAttention(nnx.bridge.ToNNX):
  """Softmax attention with routed heads.

    budget = HeadBudget(8, shared=2, top_k=4, head_dim=8)
    y, aux = MoHAttention(64, budget, rngs=nnx.Rngs(0))(x)

  Parameters have the names and numbers of Linen, as `layer.out["kernel"]`.
  """

  def __init__(
    self,
    in_features: int,
    budget: HeadBudget,
    *,
    rngs: nnx.Rngs,
    context_features: int | None = None,
    time_features: int | None = None,
    deterministic: bool = False,
    **fields: Any,
  ):
    """Makes the parameters for tokens, and a context, of such widths.

    Args:
      in_features: C.
      budget: the layer's head split.
      rngs: of the parameters and, if `dropout_rate` is above 0, of "dropout",
        from which a router of your own draws too.
      context_features: None where the layer attends to its own tokens.
      time_features: width of the steps' embeddings, for routers that read them.
      deterministic: drop nothing.
      **fields: others of `moh_jax.MoHAttention`.
    """
    layer = moh.MoHAttention(budget, **fields)
    super().__init__(layer, rngs.params())
    self.to_nnx__has_context = context_features is not None
    self.deterministic = False  # drawing needs the keys of parameters
    widths = filter(None, (in_features, context_features))
    time = time_features and jnp.zeros((1, time_features))
    self.lazy_init(*(jnp.zeros((1, 1, width)) for width in widths), time=time)
    drops = nnx.Rngs(dropout=rngs.dropout()) if layer.dropout_rate else None
    self.to_nnx__rngs = drops  # applying draws no keys for parameters
    self.deterministic = deterministic

  # The bridge takes other attributes than those with its prefix for variables.
  @property
  def deterministic(self) -> bool:
    """Whether nothing is dropped; `model.eval()` and `model.train()` set it."""
    return self.to_nnx__deterministic

  @deterministic.setter
  def deterministic(self, value: bool) -> None:
    self.to_nnx__deterministic = value

  def set_view(self, deterministic: bool | None = None) -> None:
    """Takes part in `nnx.view(model, deterministic=True)`."""
    if deterministic is not None:
      self.deterministic = deterministic

  def __call__(
    self, *args: Any, deterministic: bool | None = None, **options: Any
  ) -> tuple[jax.Array, RouterAux]:
    """Attends, as `moh_jax.MoHAttention` does with the same arguments."""
    context = args[1] if len(args) > 1 else options.get("context")
    attends = "method" not in options  # a cache is of the layer's own tokens
    if attends and (context is not None) != self.to_nnx__has_context:
      raise ValueError(
        "a context is given where the layer was made with context_features, "
        "and nowhere else"
      )
    if self.deterministic if deterministic is None else deterministic:
      options["rngs"] = nnx.Rngs()  # without keys nothing is dropped
    return super().__call__(*args, **options)
