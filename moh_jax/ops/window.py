"""Sliding windows over a token grid, and attention to a window and a pool.

A token at row i, column j sees the `window x window` tokens around it; a
position outside the grid contributes zero. Each function pads its operand once
and reads `window**2` shifted views of this copy. Unfolding keys and values into
windows instead would take `window**2` copies, nine for window 3; here only the
padded copy is in memory, and for `window_logits` on a CPU one view more. The
backward passes are written the same way: autodiff would scatter into
`window**2` padded buffers and add them up.

`aggregated_attention` is that of TransNeXt (arXiv:2311.17132): a window and the
pooled tokens of the whole grid, with one softmax.

Shapes: B batch, X rows, Y columns, N = X * Y tokens, H heads, D head dim, C
channels, L = window * window offsets in row-major order, P pooled positions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.basics import einsum_float32
from moh_jax.ops.target import target


def window_inside(grid: tuple[int, int], window: int) -> np.ndarray:
  """Marks the window positions of each token that lie inside the grid.

  Args:
    grid: rows and columns.
    window: odd width of the window.

  Returns:
    [X * Y, L] bool.
  """
  reach = window // 2
  offsets = np.arange(-reach, reach + 1)

  def axis_inside(size: int) -> np.ndarray:  # [size, window]
    index = np.arange(size)[:, None] + offsets
    return (index >= 0) & (index < size)

  rows, columns = (axis_inside(size) for size in grid)
  inside = rows[:, None, :, None] & columns[None, :, None, :]
  return inside.reshape(grid[0] * grid[1], window * window)


def _pad(x: jax.Array, reach: int) -> jax.Array:
  """Pads the grid of [B, X, Y, ...] with zeros on all sides."""
  edge = (reach, reach)
  return jnp.pad(x, [(0, 0), edge, edge] + [(0, 0)] * (x.ndim - 3))


def _shifted(x: jax.Array, window: int, *, reverse: bool = False):
  """Yields one view of x per offset (di, dj) of the window, zero outside.

  Args:
    x: [B, X, Y, ...].
    window: odd width of the window.
    reverse: negates the offsets, as backward passes read.

  Yields:
    [B, X, Y, ...] with x[b, i + di, j + dj] at [b, i, j].
  """
  rows, columns = x.shape[1:3]
  padded = _pad(x, window // 2)
  for i, j in np.ndindex(window, window):
    row, column = (window - 1 - i, window - 1 - j) if reverse else (i, j)
    yield padded[:, row : row + rows, column : column + columns]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def window_logits(q: jax.Array, k: jax.Array, window: int) -> jax.Array:
  """Dot products of each query with the keys of its window.

  Args:
    q: [B, X, Y, H, D] queries.
    k: [B, X, Y, H, D] keys.
    window: odd width of the window.

  Returns:
    [B, X, Y, H, L] float32; 0 where the window leaves the grid.
  """
  q = q.astype(jnp.float32)
  if target().platform != "cpu":  # compilers fuse views and products
    dots = [jnp.sum(q * view, axis=-1) for view in _shifted(k, window)]
    return jnp.stack(dots, axis=-1)
  # XLA for CPUs does not fuse a slice into a sum over the last axis. It would
  # hold all `window**2` views at once; in a loop they share one buffer.
  padded = _pad(k, window // 2)

  def one(offset: jax.Array) -> jax.Array:  # [B, X, Y, H]
    start = (0, offset // window, offset % window, 0, 0)
    view = jax.lax.dynamic_slice(padded, start, k.shape)
    return jnp.sum(q * view, axis=-1)

  return jnp.moveaxis(jax.lax.map(one, jnp.arange(window**2)), 0, -1)


def _window_logits_bwd(window, residuals, grad):
  q, k = residuals
  dq = window_mix(grad, k, window)
  dk = _window_scatter(grad, q, window)
  return dq.astype(q.dtype), dk.astype(k.dtype)


window_logits.defvjp(
  lambda q, k, window: (window_logits(q, k, window), (q, k)), _window_logits_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def window_mix(weights: jax.Array, v: jax.Array, window: int) -> jax.Array:
  """Weighted sum of the values of each token's window.

  Args:
    weights: [B, X, Y, H, L] one weight per window position.
    v: [B, X, Y, H, D] values; zero outside the grid.
    window: odd width of the window.

  Returns:
    [B, X, Y, H, D] in the wider of the two dtypes.
  """
  views = enumerate(_shifted(v, window))
  return sum(weights[..., offset, None] * view for offset, view in views)


def _window_mix_bwd(window, residuals, grad):
  weights, v = residuals
  dweights = window_logits(grad, v, window)
  dv = _window_scatter(weights, grad, window)
  return dweights.astype(weights.dtype), dv.astype(v.dtype)


window_mix.defvjp(
  lambda weights, v, window: (window_mix(weights, v, window), (weights, v)),
  _window_mix_bwd,
)


def _window_scatter(weights: jax.Array, x: jax.Array, window: int) -> jax.Array:
  """Transpose of `window_mix` with respect to its values.

  out[m] is the sum over offsets o of weights[m - o, o] * x[m - o]: each token
  adds its weighted x to the tokens of its window.
  """
  weight_views = _shifted(weights, window, reverse=True)
  x_views = _shifted(x, window, reverse=True)
  pairs = enumerate(zip(weight_views, x_views))
  return sum(w[..., offset, None] * view for offset, (w, view) in pairs)


@jax.custom_vjp
def depthwise_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Depthwise convolution, stride 1, zero padding, as shifted multiply-adds.

  On a CPU this is many times faster than XLA's grouped convolution.

  Args:
    x: [B, X, Y, C].
    kernel: [window, window, C], window odd.

  Returns:
    [B, X, Y, C] in the dtype of x.
  """
  window = kernel.shape[0]
  taps = kernel.reshape(window * window, 1, 1, 1, -1)
  out = sum(view * tap for view, tap in zip(_shifted(x, window), taps))
  return out.astype(x.dtype)


def _depthwise_conv_bwd(residuals, grad):
  x, kernel = residuals
  window = kernel.shape[0]
  dx = depthwise_conv(grad, kernel[::-1, ::-1])
  dkernel = _taps_grad(x, grad, window)  # [L, C] float32
  return dx, dkernel.reshape(kernel.shape).astype(kernel.dtype)


depthwise_conv.defvjp(
  lambda x, kernel: (depthwise_conv(x, kernel), (x, kernel)),
  _depthwise_conv_bwd,
)


def _taps_grad(x: jax.Array, grad: jax.Array, window: int) -> jax.Array:
  """Gradient of the depthwise taps, [L, C] float32."""
  if target().platform != "cpu":
    grad = grad.astype(jnp.float32)
    sums = [(view * grad).sum((0, 1, 2)) for view in _shifted(x, window)]
    return jnp.stack(sums)
  # Nine sums over the whole grid would read it nine times from memory; a row of
  # it stays in cache.
  rows, columns = x.shape[1:3]
  padded = _pad(x, window // 2)

  def one_row(row: jax.Array) -> jax.Array:  # [L, C]
    band = jax.lax.dynamic_slice_in_dim(padded, row, window, axis=1)
    own = jax.lax.dynamic_index_in_dim(grad, row, axis=1, keepdims=False)
    own = own.astype(jnp.float32)
    offsets = np.ndindex(window, window)
    views = (band[:, i, j : j + columns] for i, j in offsets)
    return jnp.stack([(view * own).sum((0, 1)) for view in views])

  return jax.lax.map(one_row, jnp.arange(rows)).sum(0)


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

  Keys of the window are read as shifted views of one padded copy.

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
  batch, tokens, heads, dim = q.shape
  on_grid = (batch, *grid, heads)

  logits = window_logits(
    q.reshape(*on_grid, dim), k.reshape(*on_grid, dim), window
  )
  logits = logits.reshape(batch, tokens, heads, -1)
  logits = logits + window_bias[None, None]
  inside = window_inside(grid, window)[:, None, :]
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
  on_grid = (batch, *grid, heads)
  out = window_mix(
    window_weights.reshape(*on_grid, -1).astype(v.dtype),
    v.reshape(*on_grid, dim),
    window,
  ).reshape(batch, tokens, heads, dim)
  pool_out = einsum_float32(
    "bhnp,bphd->bnhd", pool_weights.astype(pool_v.dtype), pool_v
  )
  return (out + pool_out / total[..., None]).astype(v.dtype)
