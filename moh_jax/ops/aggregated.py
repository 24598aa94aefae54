"""Aggregated attention of TransNeXt (arXiv:2311.17132): window plus pool.

Shapes: B batch, X x Y the token grid, N = X * Y tokens, H heads, D head dim,
L window positions, P pooled positions.
"""

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops import window as window_ops
from moh_jax.ops.basics import einsum_float32


def l2_normalize(x: jax.Array) -> jax.Array:
  """Divides x by max(||x||, 1e-12) over the last axis, in float32."""
  x = x.astype(jnp.float32)
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def aggregated_weights(
  q: jax.Array,
  k: jax.Array,
  pool_k: jax.Array,
  *,
  grid: tuple[int, int],
  window: int,
  window_bias: jax.Array,
  pool_bias: jax.Array,
  position_weights: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Weights of a sliding window and of pooled tokens with one softmax.

  Keys of the window are read as shifted views of one padded copy (see
  `ops.window`).

  Args:
    q: [B, N, H, D] scaled queries.
    k: [B, N, H, D] keys of the window.
    pool_k: [B, P, H, D] keys of the pooled tokens.
    grid: X and Y.
    window: odd width of the window.
    window_bias: [H, L] added to the window logits.
    pool_bias: [H, N, P] added to the pooled logits.
    position_weights: [B, N, H, L] added to the window's weights after the
      softmax (TransNeXt's positional attention).

  Returns:
    The window's weights [B, N, H, L]; the pooled tokens' [B, H, N, P], which
    are still to be divided by the softmax's sum; this sum, [B, N, H]. All are
    float32.
  """
  chex.assert_equal_shape((q, k))
  batch, tokens, heads, dim = q.shape
  on_grid = (batch, *grid, heads)

  logits = window_ops.window_logits(
    q.reshape(*on_grid, dim), k.reshape(*on_grid, dim), window
  )
  logits = logits.reshape(batch, tokens, heads, -1)
  logits = logits + window_bias[None, None]
  inside = window_ops.window_inside(grid, window)[:, None, :]
  logits = jnp.where(inside[None], logits, -jnp.inf)

  pool_logits = einsum_float32("bnhd,bphd->bhnp", q, pool_k)
  pool_logits = pool_logits + pool_bias[None]

  # One softmax over both parts without concatenating them: a shared maximum
  # and a shared sum. The token itself is always inside the window.
  pool_max = pool_logits.max(-1)  # [B, H, N]
  highest = jnp.maximum(logits.max(-1), pool_max.swapaxes(1, 2))
  highest = jax.lax.stop_gradient(highest)  # [B, N, H]
  weights = jnp.exp(logits - highest[..., None])
  pool_weights = jnp.exp(pool_logits - highest.swapaxes(1, 2)[..., None])
  total = weights.sum(-1) + pool_weights.sum(-1).swapaxes(1, 2)  # [B, N, H]
  return weights / total[..., None] + position_weights, pool_weights, total


def aggregated_attention(
  weights: tuple[jax.Array, jax.Array, jax.Array],
  v: jax.Array,
  pool_v: jax.Array,
  *,
  grid: tuple[int, int],
  window: int,
) -> jax.Array:
  """Attends to a sliding window and to pooled tokens.

  The only arrays with an entry per query and key are the weights.

  Args:
    weights: of `aggregated_weights`.
    v: [B, N, H, D] values of the window.
    pool_v: [B, P, H, D] values of the pooled tokens.
    grid: X and Y.
    window: odd width of the window.

  Returns:
    [B, N, H, D] in the dtype of v.
  """
  window_weights, pool_weights, total = weights
  batch, tokens, heads, dim = v.shape
  chex.assert_shape(pool_v, (batch, pool_weights.shape[-1], heads, dim))
  on_grid = (batch, *grid, heads)
  out = window_ops.window_mix(
    window_weights.reshape(*on_grid, -1).astype(v.dtype),
    v.reshape(*on_grid, dim),
    window,
  ).reshape(batch, tokens, heads, dim)
  pool_out = einsum_float32(
    "bhnp,bphd->bnhd", pool_weights.astype(pool_v.dtype), pool_v
  )
  return (out + pool_out / total[..., None]).astype(v.dtype)
