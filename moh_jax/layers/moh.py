"""Mixture-of-Head attention: router, head mixing, and the whole layer.

The contract that every family follows: it makes per-head outputs
`heads` [B, N, H, D] in its own way; `HeadRouter` turns the tokens into
`gates` [B, N, H] float32, exactly 0 for the heads a token did not choose; and
`HeadMix` maps both to [B, N, C].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.attend import active_heads, attend, attend_to_cache
from moh_jax.layers.linear import product
from moh_jax.layers.partitioning import constrain
from moh_jax.ops import routing
from moh_jax.ops.cache import write_cache
from moh_jax.ops.mesh import on_one_device
from moh_jax.ops.position import Rotation, rotate
from moh_jax.ops.routing import RouterAux

Axes = int | tuple[int, ...]

# The released ViT draws every linear weight with this deviation.
LINEAR_INIT = nn.initializers.normal(0.02)

_MIX_AXES = ("heads", "head_dim", "embed")

# (axes of the inputs, axes of the outputs) -> initializer of a kernel.
KernelInit = Callable[[Axes, Axes], nn.initializers.Initializer]


def normal_init(inputs: Axes, outputs: Axes) -> nn.initializers.Initializer:
  """The same deviation whatever the shape, as the released ViT."""
  del inputs, outputs
  return LINEAR_INIT


def xavier_init(inputs: Axes, outputs: Axes) -> nn.initializers.Initializer:
  """Uniform by fan-in and fan-out of the whole matrix, as the released DiT."""
  return nn.initializers.xavier_uniform(in_axis=inputs, out_axis=outputs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadChoice:
  """How a layer departs from its head budget, without other parameters.

  Attributes:
    top_k: [] int32 routed heads per token, in place of the budget's.
    order: [H] int32, the heads in the order in which the first are shared; None
      is their own order. `Routing` follows this order, gates the heads' own.
    scale: [H] or [B, 1, H] float32 that multiplies the gates, to see what a
      head is worth.
  """

  top_k: jax.Array | None = None
  order: jax.Array | None = None
  scale: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
  """Where tokens stand in their texts; what is None does not apply.

  Attributes:
    rotation: RoPE's angles of the tokens.
    segments: [B, N] int32 documents packed into a sequence; a token sees only
      its own.
    slot: [] int32 slot of the cache for the first of the tokens.
    visible: [B, N, M] bool slots of the cache that the tokens see; None where
      they see one another alone.
  """

  rotation: Rotation | None = None
  segments: jax.Array | None = None
  slot: jax.Array | None = None
  visible: jax.Array | None = None


class HeadRouter(nn.Module):
  """Decides which heads a token uses and with what weight.

  The two-stage router has up to three bias-free matrices: `routed` [C, R]
  (W_r), `shared` [C, S] (W_s, for two or more shared heads) and `group` [C, 2]
  (W_h, where both groups are in use); "query_norm" has none. Everything is
  float32 at full matrix precision whatever the compute dtype: a rounding that
  swaps the last selected head changes the output.

  Under `mutable=["intermediates"]` the layer records its `routing`.

  Attributes:
    budget: the layer's head split.
    config: the kind and form of the router.
    kernel_init: of the matrices.
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
      norms: [B, N, H] norms of the queries, which "query_norm" needs.
      choice: what departs from the budget in this layer.

    Returns:
      gates [B, N, H] float32, or None for the kind "none" (every head weighs
      one), and the side values.
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
      if choice.order is not None:
        norms = jnp.take(norms, choice.order, axis=-1)
      decided = routing.query_norm_gates(
        norms,
        budget,
        straight_through=config.straight_through,
        top_k=choice.top_k,
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
      gates = gates * choice.scale
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
    )

  def _logits(self, x: jax.Array, sizes: dict[str, int]) -> dict:
    """One product for all router matrices; [B, N, size] float32 each."""
    if not sizes:
      return {}
    kernels = [
      self.param(
        name,
        nn.with_logical_partitioning(self.kernel_init(0, 1), ("embed", None)),
        (x.shape[-1], size),
        jnp.float32,
      )
      for name, size in sizes.items()
    ]
    kernel = jnp.concatenate([k.astype(jnp.float32) for k in kernels], axis=-1)
    logits = jnp.matmul(
      x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )
    splits = list(sizes.values())
    bounds = [sum(splits[:i]) for i in range(1, len(splits))]
    return dict(zip(sizes, jnp.split(logits, bounds, axis=-1)))


class HeadProjection(nn.Module):
  """Projects tokens to per-head vectors, several kinds in one product.

  Attributes:
    parts: kinds of vectors (3 for queries, keys and values).
    num_heads: heads of each kind.
    head_dim: width of a head.
    use_bias: add a learned bias.
    kernel_init: of the kernel.
    output_major: the kernel is [parts, H, D, C], else [C, parts, H, D].
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  parts: int
  num_heads: int
  head_dim: int
  use_bias: bool = True
  kernel_init: KernelInit = normal_init
  output_major: bool = False
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> list[jax.Array]:
    """Maps x [B, N, C] to `parts` arrays [B, N, H, D]."""
    shape = (self.parts, self.num_heads, self.head_dim)
    whole, axes = (x.shape[-1], *shape), ("embed", None, "heads", "head_dim")
    init = self.kernel_init(0, (1, 2, 3))
    if self.output_major:
      whole, axes = (*whole[1:], whole[0]), (*axes[1:], axes[0])
      init = self.kernel_init(3, (0, 1, 2))
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(init, axes),
      whole,
      self.param_dtype,
    )
    x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    if self.output_major:
      out = product(x, kernel.reshape(-1, x.shape[-1]), output_major=True)
    elif on_one_device():
      out = product(x, kernel.reshape(x.shape[-1], -1))
    else:  # heads that a mesh splits cannot be merged with the parts
      out = jnp.einsum("bnc,cphd->bnphd", x, kernel)
    out = out.reshape(*x.shape[:2], *shape)
    if self.use_bias:
      bias = self.param(
        "bias",
        nn.with_logical_partitioning(
          nn.initializers.zeros, (None, "heads", "head_dim")
        ),
        shape,
        self.param_dtype,
      )
      out = out + bias.astype(out.dtype)
    # The gradient of a split is one concatenation; that of slices is a sum.
    vectors = [v[:, :, 0] for v in jnp.split(out, self.parts, axis=2)]
    return [constrain(v, "batch", None, "heads", "head_dim") for v in vectors]


class HeadMix(nn.Module):
  """Gated sum of the heads' outputs (arXiv:2410.11842, eq. 4).

  Attributes:
    features: C, width of the result.
    use_bias: add a learned bias.
    kernel_init: of the kernel.
    output_major: the kernel is [C, H, D], else [H, D, C].
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  features: int
  use_bias: bool = True
  kernel_init: KernelInit = normal_init
  output_major: bool = False
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, heads: jax.Array, gates: jax.Array | None = None
  ) -> jax.Array:
    """Mixes heads.

    Args:
      heads: [B, N, H, D].
      gates: [B, N, H], or None to weigh every head by one.

    Returns:
      [B, N, C].
    """
    chex.assert_rank(heads, 4)
    shape, axes = (*heads.shape[2:], self.features), _MIX_AXES
    init = self.kernel_init((0, 1), 2)
    if self.output_major:
      shape, axes = (shape[2], *shape[:2]), (axes[2], *axes[:2])
      init = self.kernel_init((1, 2), 0)
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(init, axes),
      shape,
      self.param_dtype,
    )
    if gates is not None:
      chex.assert_equal_shape_prefix((heads, gates), 3)
      heads = heads * gates[..., None].astype(heads.dtype)
    heads, kernel = nn.dtypes.promote_dtype(heads, kernel, dtype=self.dtype)
    flat = heads.reshape(*heads.shape[:2], -1)
    if self.output_major:
      matrix = kernel.reshape(self.features, -1)
      out = product(flat, matrix, output_major=True)
    else:
      out = product(flat, kernel.reshape(-1, self.features))
    if self.use_bias:
      bias = self.param(
        "bias", nn.initializers.zeros, (self.features,), self.param_dtype
      )
      out = out + bias.astype(out.dtype)
    return constrain(out, "batch", None, None)


class MoHAttention(nn.Module):
  """Softmax attention with routed heads, the plain form (DiT, LLM).

  Attributes:
    budget: the layer's head split; H * D need not equal the width.
    router: the kind and form of the router.
    num_kv_heads: key/value heads; None is one per query head.
    causal: whether a token sees only itself and the tokens before it.
    use_bias: biases of the query, key and value projections.
    out_bias: bias of the output projection; None is as `use_bias`.
    kernel_init: of the projections and the router.
    output_major: how the projections' kernels are stored.
    implementation: see `ops.attention.attention` and `ops.cached_attention`.
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  budget: HeadBudget
  router: RouterConfig = RouterConfig()
  num_kv_heads: int | None = None
  causal: bool = False
  use_bias: bool = True
  out_bias: bool | None = None
  kernel_init: KernelInit = normal_init
  output_major: bool = False
  implementation: str = "auto"
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    places: Places | None = None,
    choice: HeadChoice | None = None,
  ) -> tuple[jax.Array, RouterAux]:
    """Attends.

    Where the variable collection "cache" holds a `LayerCache`, "keys_values",
    the tokens' keys and values are written to it from `places.slot` on.

    Args:
      x: [B, N, C] tokens.
      token_mask: [B, N] bool, False for padding: unseen as keys, not counted by
        the router's statistics.
      places: where the tokens stand in their texts.
      choice: how the layer departs from its budget.

    Returns:
      [B, N, C] and the router's side values.
    """
    places = Places() if places is None else places
    q, k, v = self._project(x)
    routed_by_norm = self.router.kind == "query_norm"
    norms = routing.query_norms(q) if routed_by_norm else None
    gates, aux = HeadRouter(
      self.budget, self.router, self.kernel_init, name="router"
    )(x, token_mask, norms=norms, choice=choice)
    if places.rotation is not None:
      q, k = (rotate(part, places.rotation) for part in (q, k))
    if self.has_variable("cache", "keys_values"):
      cache = self.variable("cache", "keys_values", lambda: None)
      cache.value = write_cache(cache.value, k, v, places.slot)
    top_k = None if choice is None else choice.top_k
    active = active_heads(gates, self.budget, self.router, top_k)
    if places.visible is not None:
      out = attend_to_cache(
        q,
        cache.value,
        places.visible,
        active=active,
        implementation=self.implementation,
      )
    else:
      out = attend(
        q,
        k,
        v,
        active=active,
        key_mask=token_mask,
        segments=places.segments,
        causal=self.causal,
        implementation=self.implementation,
      )
    bias = self.use_bias if self.out_bias is None else self.out_bias
    mix = HeadMix(x.shape[-1], name="out", **self._kinds(bias))
    return mix(out, gates), aux

  def _project(self, x: jax.Array) -> list[jax.Array]:
    heads, dim = self.budget.num_heads, self.budget.head_dim
    kinds = self._kinds(self.use_bias)
    if self.num_kv_heads in (None, heads):
      return HeadProjection(3, heads, dim, name="qkv", **kinds)(x)
    query = HeadProjection(1, heads, dim, name="q", **kinds)
    pair = HeadProjection(2, self.num_kv_heads, dim, name="kv", **kinds)
    return [*query(x), *pair(x)]

  def _kinds(self, use_bias: bool) -> dict[str, Any]:
    return {
      "use_bias": use_bias,
      "kernel_init": self.kernel_init,
      "output_major": self.output_major,
      "dtype": self.dtype,
      "param_dtype": self.param_dtype,
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelAux:
  """Router side values of a whole model.

  Attributes:
    balance_loss: [] mean over the layers that route, 0 if none does.
    activated_share: [] heads used over heads present, all layers together.
    layers: per group of equal layers, its `RouterAux` with a leading layer
      axis.
  """

  balance_loss: jax.Array
  activated_share: jax.Array
  layers: dict[str, RouterAux]


def collect_aux(
  layers: dict[str, RouterAux], top_k: dict[str, int]
) -> ModelAux:
  """Gathers the side values of groups of equal layers.

  Args:
    layers: per group, values with a leading layer axis.
    top_k: per group, routed heads a token activates (0 for no router).
  """
  losses = [layers[name].balance_loss for name in layers if top_k[name]]
  loss = jnp.concatenate(losses).mean() if losses else jnp.zeros(())
  loads = [aux.load for aux in layers.values()]
  used = sum(load.sum() for load in loads)
  present = sum(load.size for load in loads)
  return ModelAux(loss, used / present, layers)
