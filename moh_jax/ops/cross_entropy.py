"""Cross-entropy of a large vocabulary, some tokens of each sequence at a time.

The logits of a whole batch, [B, N, V] float32, would be the largest array of a
language model by far. Here only those of `chunk` tokens of each sequence exist
at a time, and only in the forward pass: it computes the gradients too, which is
possible because the loss is a weighted sum with known weights.

Shapes: B batch, N tokens, C width, V vocabulary, n tokens of a chunk. Inside, B
are the examples, and V the columns, that a device computes with.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.basics import einsum_float32
from moh_jax.ops.columns import ALL, Columns
from moh_jax.ops.target import target


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def summed_cross_entropy(
  x: jax.Array,
  kernel: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  chunk: int,
  columns: Columns = ALL,
) -> jax.Array:
  """Weighted sum of the tokens' cross-entropies.

  Where devices share the columns of the kernel, the arguments are a device's
  own, and the result is its part of a sum over all devices. Gradients are those
  of that sum.

  Args:
    x: [B, N, C] inputs of the output layer.
    kernel: [C, V] kernel of the output layer; products are in the dtype of x.
    targets: [B, N] int32.
    weights: [B, N] float32, 0 for tokens that do not count. They get no
      gradient.
    chunk: n; 0 takes all tokens at once.
    columns: how devices share the columns of the kernel.

  Returns:
    [] float32, nats.
  """
  return _scan_chunks(
    x, kernel, targets, weights, chunk, columns, gradients=False
  )[0]


def _backward(chunk, columns, grads, cotangent):
  del chunk, columns
  dx, dkernel = grads
  scaled = (cotangent * dx).astype(dx.dtype), cotangent * dkernel
  return (*scaled, None, None)


def token_cross_entropy(
  x: jax.Array,
  kernel: jax.Array,
  targets: jax.Array,
  chunk: int,
  columns: Columns = ALL,
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each token, and whether its target is the most likely.

  Args:
    x: [B, N, C] inputs of the output layer.
    kernel: [C, V] kernel of the output layer.
    targets: [B, N] int32.
    chunk: n; 0 takes all tokens at once.
    columns: how devices share the columns of the kernel.

  Returns:
    [B, N] float32, nats; and [B, N] bool, True if no logit is larger.
  """
  kernel = kernel.astype(x.dtype)

  def one(parts: tuple) -> tuple[jax.Array, jax.Array]:
    part, target = (columns.gather(part) for part in parts)
    logits, picked, highest = _logits(part, kernel, target, columns)
    _, sums = _exponentials(logits, highest)
    nll = jnp.log(columns.sum(sums)) + highest - picked
    return columns.own(nll), columns.own(picked >= highest)

  parts = _split(chunk, x, targets)
  joined = [_join(part) for part in jax.lax.map(one, parts)]
  length = targets.shape[1]
  return joined[0][:, :length], joined[1][:, :length]


def _scan_chunks(
  x, kernel, targets, weights, chunk, columns, *, gradients: bool
):
  chex.assert_equal_shape((targets, weights))
  rounded = kernel.astype(x.dtype)

  def one(carry: tuple, parts: tuple) -> tuple:
    total, dkernel = carry
    part, target, weight = (columns.gather(part) for part in parts)
    logits, picked, highest = _logits(part, rounded, target, columns)
    exps, sums = _exponentials(logits, highest)
    sums = columns.sum(sums)
    nll = jnp.log(sums) + highest - picked
    total = total + (nll * weight).sum()
    if not gradients:
      return (total, dkernel), None
    size = logits.shape[-1]
    place = columns.place(target, size)
    is_target = jnp.arange(size)[None, None] == place[..., None]
    hit = jnp.where(is_target, weight[..., None], 0.0)
    grad = exps * (weight / sums)[..., None] - hit
    grad = grad.astype(x.dtype)
    dx = columns.scatter(jnp.einsum("bnv,cv->bnc", grad, rounded))
    dkernel = dkernel + einsum_float32("bnc,bnv->cv", part, grad)
    return (total, dkernel), dx

  size = kernel.shape if gradients else (0,)
  start = (jnp.zeros((), jnp.float32), jnp.zeros(size, jnp.float32))
  parts = _split(chunk, x, targets, weights)
  # Without a loop XLA drops the addition to the zeros that the sums start with.
  single = len(parts[0]) == 1
  (total, dkernel), dx = jax.lax.scan(one, start, parts, unroll=single)
  total = columns.share(total)
  if not gradients:
    return total, None
  dx = _join(dx)[:, : x.shape[1]]
  return total, (dx, dkernel.astype(kernel.dtype))


summed_cross_entropy.defvjp(
  functools.partial(_scan_chunks, gradients=True), _backward
)


def _logits(
  x: jax.Array, kernel: jax.Array, targets: jax.Array, columns: Columns
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Logits [B, n, V] float32, those of the targets and the largest, [B, n]."""
  logits = einsum_float32("bnc,cv->bnv", x, kernel)
  place = columns.place(targets, logits.shape[-1])
  picked = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
  if columns.axes:
    picked = columns.sum(jnp.where(place >= 0, picked, 0))
  return logits, picked, columns.max(logits.max(-1))


def _exponentials(
  logits: jax.Array, highest: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The softmax's numerators [B, n, V] and their sums [B, n], float32."""
  exps = jnp.exp(logits - highest[..., None])
  if target().platform == "cpu":
    # For a sum, XLA would recompute all exponentials, on a single core.
    return exps, jnp.einsum("bnv,v->bn", exps, jnp.ones_like(exps[0, 0]))
  return exps, exps.sum(-1)


def _split(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Splits [B, N, ...] to [chunks, B, n, ...], padded with zeros."""
  length = arrays[0].shape[1]
  chunk = min(chunk or length, length)
  parts = -(-length // chunk)

  def one(x: jax.Array) -> jax.Array:
    fill = [(0, 0), (0, parts * chunk - length), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, fill).reshape(x.shape[0], parts, chunk, *x.shape[2:])
    return x.swapaxes(0, 1)

  return tuple(one(x) for x in arrays)


def _join(x: jax.Array) -> jax.Array:
  """Joins [chunks, B, n, ...] to [B, chunks * n, ...]."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
