"""Mixture-of-Head attention as one layer.

The contract that every family follows: it makes per-head outputs
`heads` [B, N, H, D] in its own way; `HeadRouter` turns the tokens into
`gates` [B, N, H] float32, exactly 0 for the heads a token did not choose; and
`HeadMix` maps both to [B, N, C].
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.layers.attend import (
  active_heads,
  attend_on_mesh,
  attend_to_cache,
  implementation_of,
)
from moh_jax.layers.heads import HeadMix, HeadProjection, layer_layout
from moh_jax.layers.linear import KernelInit, normal_init
from moh_jax.layers.partitioning import (
  axes_of,
  constrain,
  drop_elements,
  split_alike,
  split_batch_alone,
)
from moh_jax.layers.router import HeadChoice, HeadRouter
from moh_jax.ops import routing
from moh_jax.ops.basics import as_mask, check_array
from moh_jax.ops.cache import LayerCache, Slots, write_cache
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.lanes import HeadLayout
from moh_jax.ops.placement import place_heads
from moh_jax.ops.position import Rotation, rotate
from moh_jax.ops.routing import RouterAux

_PADDING = ", False for padding"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
  """Where tokens stand in their texts; None where it does not matter.

  Attributes:
    rotation: RoPE's angles of the tokens.
    segments: [B, N] int32 number of the document that each token belongs to,
      where several are packed into a sequence; a token sees only its own.
    counted: [B, N] bool, tokens that the balance loss and the statistics count;
      None is those of the token mask.
  """

  rotation: Rotation | None = None
  segments: jax.Array | None = None
  counted: jax.Array | None = None


class MoHAttention(nn.Module):
  """Softmax attention with routed heads, the plain form (DiT, LLM).

  In a Linen model it is a layer with two results:

    y, aux = MoHAttention(HeadBudget(8, shared=2, top_k=4, head_dim=16))(x)

  On its own, `init` returns parameters boxed with the logical names of their
  dimensions, for sharding. Without a mesh, unbox them:

    params = flax.linen.unbox(layer.init(key, x))["params"]
    y, aux = layer.apply({"params": params}, x)

  `apply` takes boxed parameters as well and gives the same result. In NNX it is
  `moh_jax.nnx.MoHAttention`.

  Attributes:
    budget: the layer's head split; H * D need not equal the width.
    router: the kind and form of the router.
    num_kv_heads: key/value heads; None is one per query head.
    causal: whether a token sees only itself and the tokens before it.
    use_bias: biases of the query, key and value projections.
    out_bias: bias of the output projection; None is as `use_bias`.
    qk_norm: epsilon of an RMSNorm over D of queries and keys, before RoPE; None
      is no norm. The router `query_norm` reads the queries before it: after it
      the norms of all heads would be nearly equal.
    kernel_init: makes the initializer of a projection or the router from the
      kernel's input and output dimensions, as
      `lambda i, o: nn.initializers.xavier_uniform(i, o)`.
    out_init: that of the output projection; None is `kernel_init`.
    out_multiplier: constant that multiplies the layer's output.
    output_major: how the projections' kernels are stored, see `KernelLayer`.
    implementation: see `attention` and `choose_cached_form` of
      `ops.attention`.
    dropout_rate: share of the outputs' elements that training drops.
    dtype: compute dtype; the router's is float32.
    param_dtype: of the parameters, but the router's, which are float32.
  """

  budget: HeadBudget
  router: RouterConfig = RouterConfig()
  num_kv_heads: int | None = None
  causal: bool = False
  use_bias: bool = True
  out_bias: bool | None = None
  qk_norm: float | None = None
  kernel_init: KernelInit = normal_init
  out_init: KernelInit | None = None
  out_multiplier: float = 1.0
  output_major: bool = False
  implementation: str = "auto"
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    context: jax.Array | None = None,
    *,
    token_mask: jax.Array | None = None,
    context_mask: jax.Array | None = None,
    places: Places | None = None,
    choice: HeadChoice | None = None,
    time: jax.Array | None = None,
    deterministic: bool | None = None,
    memory: tuple[LayerCache, Slots] | None = None,
    **others: Any,
  ) -> tuple[jax.Array, RouterAux] | tuple[jax.Array, RouterAux, LayerCache]:
    """Attends.

    Args:
      x: [B, N, C] tokens.
      context: [B, M, any width] tokens that those of x attend to, which still
        choose the heads; None is x.
      token_mask: [B, N] bool, or integers 0 and 1, False for padding: unseen
        as keys, not counted by the router's statistics.
      context_mask: [B, M] bool, False for padding of the context.
      places: where the tokens stand in their texts, without a context.
      choice: runtime overrides of the budget.
      time: [B, any width] embedding of each example's diffusion step, for
        routers that read it.
      deterministic: whether none are dropped; None is where there is no rng
        "dropout".
      **others: none; what Flax's attention takes is named.
      memory: earlier keys and values, and where the new ones go: `decode`.

    Returns:
      [B, N, C] and the router's side values; with a memory its new cache too.

    Raises:
      TypeError: there are others, such as `mask` of Flax's attention.
      ValueError: shapes or dtypes are none of these.
    """
    if others:
      raise TypeError(
        f"MoHAttention takes no {', '.join(others)}: padding is token_mask "
        "[B, N], and MoHAttention(budget, causal=True) sees no later tokens"
      )
    token_mask, context_mask = as_mask(token_mask), as_mask(context_mask)
    self._check(x, context, token_mask, context_mask, places)
    whole, (places, choice) = x, (places or Places(), choice or HeadChoice())
    given = split_batch_alone((x, context, token_mask, context_mask))
    x, context, token_mask, context_mask = given
    counted = token_mask if places.counted is None else places.counted
    key_mask = token_mask if context is None else context_mask
    visible = Visible(key_mask, places.segments, self.causal)
    layout = self.layout(cached=memory is not None)

    q, k, v = self.project(x, layout, context)
    gates, aux = self.route(x, q, layout, counted, choice, time)
    q, k = self.rotate([q, k], places.rotation, layout)
    if memory is not None:
      cache, slots = memory
      memory = write_cache(cache, k, v, slots.start), slots
    kinds = self.budget, self.router, choice, layout.placement
    active = active_heads(gates, *kinds, self.num_kv_heads)
    call = Call(q, k, v, visible, layout.dim**-0.5, active=active)
    heads = self.attend(call, memory)
    bias = self.use_bias if self.out_bias is None else self.out_bias
    init = self.out_init or self.kernel_init
    kinds = self._kinds(layout, use_bias=bias, kernel_init=init)
    mix = HeadMix(x.shape[-1], self.out_multiplier, name="out", **kinds)
    out = mix(heads, gates)

    if deterministic is None:
      deterministic = not self.has_rng("dropout")
    if self.dropout_rate and not deterministic:
      out = drop_elements(self, out, self.dropout_rate)
    out = split_alike(out, whole)
    return (out, aux) if memory is None else (out, aux, memory[0])

  def decode(
    self,
    x: jax.Array,
    cache: LayerCache,
    slots: Slots,
    token_mask: jax.Array | None = None,
    *,
    places: Places | None = None,
    choice: HeadChoice | None = None,
  ) -> tuple[jax.Array, RouterAux, LayerCache]:
    """Attends to earlier tokens too, whose keys and values are in a cache.

    Call it by `layer.apply(..., method="decode")`.

    Args:
      x: [B, N, C] new tokens.
      cache: keys and values of the tokens before them (`ops.cache.make_cache`).
      slots: where the new tokens' keys and values go, and which they see.
      token_mask: as in `__call__`; keys are masked only if `slots.first` is
        None, which else says what tokens see. The same holds for segments.
      places: as in `__call__`.
      choice: as in `__call__`.

    Returns:
      [B, N, C], the router's side values, and the cache with the new tokens in
      it; the one that was given is unchanged.
    """
    given = {"places": places, "choice": choice, "memory": (cache, slots)}
    return self(x, token_mask=token_mask, **given)

  def project(
    self, x: jax.Array, layout: HeadLayout, context: jax.Array | None = None
  ) -> list[jax.Array]:
    """Queries, keys and values, [B, N, H or K, the layout's width]."""
    heads, dim = self.budget.num_heads, self.budget.head_dim
    kinds = self._kinds(layout)
    if context is None and self.num_kv_heads in (None, heads):
      return HeadProjection(3, heads, dim, name="qkv", **kinds)(x)
    query = HeadProjection(1, heads, dim, name="q", **kinds)
    kv_heads = self.num_kv_heads or heads
    pair = HeadProjection(2, kv_heads, dim, name="kv", **kinds)
    return [*query(x), *pair(x if context is None else context)]

  def route(
    self,
    x: jax.Array,
    q: jax.Array,
    layout: HeadLayout,
    counted: jax.Array | None,
    choice: HeadChoice,
    time: jax.Array | None = None,
  ) -> tuple[jax.Array | None, RouterAux]:
    """Gates [B, N, H] in the layout's order, or None; and side values."""
    norms = None
    if self.router.reads_norms:
      # Whole before its heads change places: XLA ends the process where it
      # splits a gather of heads on a mesh of three axes.
      norms = constrain(routing.query_norms(q), "batch", "tokens", None)
      norms = layout.undealt(norms)
    kinds = self.budget, self.router, self.kernel_init, self.num_kv_heads
    router = HeadRouter(*kinds, name="router")
    gates, aux = router(x, counted, norms=norms, time=time, choice=choice)
    if gates is not None:
      # The router is whole on each device: the heads of the mix must not split
      # its small arrays.
      gates = layout.dealt(constrain(gates, "batch", "tokens", None))
    return gates, aux

  def rotate(
    self, parts: list[jax.Array], angles: Rotation | None, layout: HeadLayout
  ) -> list[jax.Array]:
    """Norms and rotates queries and keys, as far as the layer does."""
    if self.qk_norm is not None:
      parts = [
        nn.RMSNorm(self.qk_norm, self.dtype, self.param_dtype, name=name)(x)
        for name, x in zip(("q_norm", "k_norm"), parts)
      ]
    if angles is not None:
      parts = [rotate(x, angles, layout.count(x.shape[2])) for x in parts]
    return parts

  def attend(
    self, call: Call, memory: tuple[LayerCache, Slots] | None = None
  ) -> jax.Array:
    """Outputs of the heads, [B, N, H, the layout's width]."""
    form = implementation_of(self)
    if memory is not None and memory[1].first is not None:
      return attend_to_cache(call.q, *memory, call.active, form)
    return attend_on_mesh(call, form)

  @nn.nowrap
  def _check(
    self,
    x: jax.Array,
    context: jax.Array | None,
    token_mask: jax.Array | None,
    context_mask: jax.Array | None,
    places: Places | None,
  ) -> None:
    """Refuses what would fail later, or be taken for something else."""
    for name, kind in (("budget", HeadBudget), ("router", RouterConfig)):
      if not isinstance(found := getattr(self, name), kind):
        raise TypeError(f"{name}={found!r} must be a {kind.__name__}")
    if isinstance(self.qk_norm, bool):
      raise TypeError(
        f"qk_norm={self.qk_norm} must be the norm's epsilon, or None"
      )
    for name, tokens in (("x", x), ("context", context)):
      if tokens is not None and (np.ndim(tokens) != 3 or len(tokens) != len(x)):
        raise ValueError(
          f"{name} has shape {np.shape(tokens)}, must be [B, N, C] with "
          "one B for all; reshape or jax.vmap, and give a mask as token_mask="
        )
    if context is not None and (self.causal or places is not None):
      raise ValueError("with a context causal must be False and places None")
    check_array("token_mask", token_mask, bool, x.shape[:2], _PADDING)
    if context is not None:
      keys = context.shape[:2]
      check_array("context_mask", context_mask, bool, keys, _PADDING)
    elif context_mask is not None:
      raise ValueError("context_mask needs a context; token_mask is for x")

  @nn.nowrap
  def layout(self, *, cached: bool) -> HeadLayout:
    """Where the heads lie.

    With a cache they stay where their parameters are, in their own width: to
    move parameters for every new token would take longer than the token.
    """
    heads = self.budget.num_heads
    kv_heads = self.num_kv_heads or heads
    tensor, both = axes_of("heads"), axes_of("attended_heads")
    placement = None
    parts = Units.of(self.budget, self.router, kv_heads).parts
    # Where attention gets as many queries of all key/value heads, devices work
    # equally in any order.
    deals = parts == 1 and not self.router.needs_all_heads
    if both and not cached and deals:
      devices = math.prod(tensor.values())
      sequence = math.prod(both.values()) // devices
      sizes = devices, sequence
      placement = place_heads(heads, kv_heads, *sizes, axes=tuple(tensor))
    # An RMSNorm over D must not count zeros.
    pads = not cached and not self.output_major and self.qk_norm is None
    return layer_layout(
      self.budget.head_dim, heads, kv_heads, pads=pads, placement=placement
    )

  def _kinds(self, layout: HeadLayout, **others: Any) -> dict[str, Any]:
    """What the projections and the mix are, but for `others`."""
    fields = "use_bias", "kernel_init", "output_major", "dtype", "param_dtype"
    own = {name: getattr(self, name) for name in fields}
    return {"layout": layout, **own, **others}
