"""TransNeXt's two attentions with routed heads (arXiv:2311.17132, 2410.11842).

Both use cosine logits: unit queries plus a learned query embedding, scaled by
softplus(temperature) * log(number of keys), against unit keys, plus a bias from
a small MLP on log-spaced relative coordinates.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.attend import (
  active_heads,
  attend_on_mesh,
  implementation_of,
)
from moh_jax.layers.heads import HeadMix, HeadProjection
from moh_jax.layers.linear import LINEAR_INIT, Linear, add_bias
from moh_jax.layers.mlp import CONV_INIT, LayerNorm
from moh_jax.layers.partitioning import constrain, declare
from moh_jax.layers.router import HeadRouter
from moh_jax.ops.basics import gelu
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.position import RelativeCoordinates, pooling_bins
from moh_jax.ops.routing import RouterAux
from moh_jax.ops.window import (
  aggregated_attention,
  aggregated_weights,
  l2_normalize,
  window_inside,
)

_POSITION_MLP_DIM = 512
# softplus(temperature) starts at 1 / 0.24 (TransNeXt, section 3.3).
_TEMPERATURE_INIT = math.log(math.exp(1 / 0.24) - 1)


class QueryScale(nn.Module):
  """Length-scaled cosine queries with a learned query embedding."""

  @nn.compact
  def __call__(
    self, q: jax.Array, num_keys: np.ndarray
  ) -> tuple[jax.Array, jax.Array]:
    """Scales queries to unit length, and then by the number of keys.

    Args:
      q: [B, N, H, D].
      num_keys: [N] or [] keys that each query sees.

    Returns:
      Unit queries and scaled queries, both [B, N, H, D] float32. The logits
      are products of the latter and unit keys.
    """
    heads, dim = q.shape[2:]
    start = nn.initializers.constant(_TEMPERATURE_INIT)
    temperature = declare(self, "temperature", start, (heads,), ("heads",))
    shape, axes = (heads, dim), ("heads", "head_dim")
    embedding = declare(self, "query_embedding", LINEAR_INIT, shape, axes)
    length = jnp.asarray(np.log(num_keys), jnp.float32)  # [N] or []
    # [N, H], or [1, H] where one count serves all queries.
    scale = length.reshape(-1, 1) * jax.nn.softplus(temperature)[None]
    unit = l2_normalize(q)
    return unit, add_bias(unit, embedding) * scale[None, ..., None]


class PositionBias(nn.Module):
  """Continuous position bias: an MLP on relative coordinates, per head.

  Attributes:
    num_heads: H.
  """

  num_heads: int

  @nn.compact
  def __call__(self, coordinates: RelativeCoordinates) -> jax.Array:
    """Returns [H, N, M] float32 for N queries and M keys."""
    dim, zeros = _POSITION_MLP_DIM, nn.initializers.zeros
    kernel = self.param("fc1_kernel", LINEAR_INIT, (2, dim), jnp.float32)
    bias = self.param("fc1_bias", zeros, (dim,), jnp.float32)
    # Two multiply-adds rather than a matrix product with an inner dimension of
    # 2: the remat policy "dots" would keep its [T, 512] result for every block.
    x = jnp.asarray(coordinates.table)
    x = x[:, :1] * kernel[:1] + x[:, 1:] * kernel[1:]
    # No example is in it, so all devices would compute the same. In a training
    # step, where devices have their own examples, they do: it takes less time
    # than an exchange in every layer.
    x = constrain(nn.relu(add_bias(x, bias)), None, "devices")
    out = nn.Dense(self.num_heads, kernel_init=LINEAR_INIT, name="fc2")
    return out(x).T[:, coordinates.index]


class CosineAttention(nn.Module):
  """Base of the two attentions.

  Attributes:
    budget: the layer's head split.
    router: the kind and form of the router.
    qkv_bias: bias of the query, key and value projections.
    out_multiplier: constant that multiplies the layer's output.
    dtype: compute dtype.
  """

  budget: HeadBudget
  router: RouterConfig = RouterConfig()
  qkv_bias: bool = True
  out_multiplier: float = 1.0
  dtype: jnp.dtype = jnp.float32

  def route(self, x: jax.Array) -> tuple[jax.Array | None, RouterAux]:
    """Gates of tokens [B, N, C], and the router's side values."""
    return HeadRouter(self.budget, self.router, name="router")(x)

  def project(self, parts: int, name: str) -> HeadProjection:
    """Makes a projection of tokens to `parts` arrays [B, N, H, D]."""
    sizes = parts, self.budget.num_heads, self.budget.head_dim
    kinds = {"use_bias": self.qkv_bias, "dtype": self.dtype, "name": name}
    return HeadProjection(*sizes, **kinds)

  def mix(self, features: int) -> HeadMix:
    """Makes the projection of heads [B, N, H, D] to [B, N, features]."""
    return HeadMix(features, self.out_multiplier, name="out", dtype=self.dtype)


class FullAttention(CosineAttention):
  """Cosine attention over all tokens, for the last stage.

  Attributes:
    implementation: see `ops.attention.attention`.
  """

  implementation: str = "auto"

  @nn.compact
  def __call__(
    self, x: jax.Array, coordinates: RelativeCoordinates
  ) -> tuple[jax.Array, RouterAux]:
    """Attends.

    Args:
      x: [B, N, C] tokens.
      coordinates: relative coordinates of N queries and N keys.

    Returns:
      [B, N, C] and the router's side values.
    """
    gates, aux = self.route(x)
    q, k, v = self.project(3, "qkv")(x)
    _, q = QueryScale(name="query_scale")(q, np.asarray(x.shape[1]))
    q, k = (part.astype(self.dtype) for part in (q, l2_normalize(k)))
    bias = PositionBias(self.budget.num_heads, name="cpb")(coordinates)
    active = active_heads(gates, self.budget, self.router)
    heads = self.attend(Call(q, k, v, Visible(), 1.0, bias, active))
    return self.mix(x.shape[-1])(heads, gates), aux

  def attend(self, call: Call) -> jax.Array:
    """Outputs of the heads, [B, N, H, D]."""
    return attend_on_mesh(call, implementation_of(self))


class AggregatedAttention(CosineAttention, kw_only=True):
  """Cosine attention to a sliding window and to pooled tokens at once.

  Attributes:
    grid: rows and columns of the tokens.
    pool_grid: rows and columns of the pooled tokens.
    window: odd width of the sliding window.
  """

  grid: tuple[int, int]
  pool_grid: tuple[int, int]
  window: int = 3

  @nn.compact
  def __call__(
    self, x: jax.Array, coordinates: RelativeCoordinates
  ) -> tuple[jax.Array, RouterAux]:
    """Attends.

    Args:
      x: [B, N, C] tokens, row by row over the grid.
      coordinates: relative coordinates of N queries and the pooled keys.

    Returns:
      [B, N, C] and the router's side values.
    """
    gates, aux = self.route(x)
    project_kv = self.project(2, "kv")
    (q,), (k, v) = self.project(1, "q")(x), project_kv(x)
    pool_k, pool_v = project_kv(self._pool(x))

    counts = window_inside(self.grid, self.window).sum(-1)
    num_keys = counts + math.prod(self.pool_grid)
    unit_q, q = QueryScale(name="query_scale")(q, num_keys)
    weights = aggregated_weights(
      q.astype(self.dtype),
      l2_normalize(k).astype(self.dtype),
      l2_normalize(pool_k).astype(self.dtype),
      window_bias=self._per_position(
        "relative_pos_bias_local", nn.initializers.normal(0.0004)
      ),
      pool_bias=PositionBias(self.budget.num_heads, name="cpb")(coordinates),
      position_weights=self._position_weights(unit_q),
      grid=self.grid,
      window=self.window,
    )
    heads = self.attend(weights, v, pool_v)
    return self.mix(x.shape[-1])(heads, gates), aux

  def attend(
    self, weights: tuple[jax.Array, ...], v: jax.Array, pool_v: jax.Array
  ) -> jax.Array:
    """Outputs of the heads, [B, N, H, D]."""
    return aggregated_attention(
      weights, v, pool_v, grid=self.grid, window=self.window
    )

  def _pool(self, x: jax.Array) -> jax.Array:
    """Pooled tokens [B, P, C]: linear, GELU, average pooling, LayerNorm."""
    batch, _, channels = x.shape
    sr = Linear(
      channels,
      ("embed", "mlp"),
      kernel_init=lambda *_: CONV_INIT,
      dtype=self.dtype,
      name="sr",
    )
    x = gelu(constrain(sr(x), "batch", "tokens", "mlp"))
    x = x.reshape(batch, *self.grid, channels)
    rows, columns = (
      jnp.asarray(pooling_bins(size, bins), x.dtype)
      for size, bins in zip(self.grid, self.pool_grid)
    )
    x = jnp.einsum("pi,bijc->bpjc", rows, x)
    x = jnp.einsum("qj,bpjc->bpqc", columns, x)
    x = x.reshape(batch, -1, channels)
    return LayerNorm(epsilon=1e-5, name="norm", dtype=self.dtype)(x)

  def _position_weights(self, unit_q: jax.Array) -> jax.Array:
    """Window weights that depend on the query alone, [B, N, H, L] float32."""
    shape = (self.budget.num_heads, self.budget.head_dim, self.window**2)
    axes = ("heads", "head_dim", None)
    tokens = declare(self, "learnable_tokens", LINEAR_INIT, shape, axes)
    bias = self._per_position("learnable_bias", nn.initializers.zeros)
    return add_bias(jnp.einsum("bnhd,hdl->bnhl", unit_q, tokens), bias)

  def _per_position(self, name: str, init) -> jax.Array:
    """A parameter per head and window position, [H, L] float32."""
    shape = (self.budget.num_heads, self.window**2)
    return declare(self, name, init, shape, ("heads", None))
