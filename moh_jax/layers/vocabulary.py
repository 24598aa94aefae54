"""Embeddings and output layers whose vocabulary a mesh splits.

Both are the largest arrays of a language model and are split by tokens over all
devices that share parameters. What moves between devices are activations, never
the weights or their gradients, which no device has whole.
"""

import math

import jax
import jax.numpy as jnp

from moh_jax.layers.partitioning import axes_of, constrain, map_shards
from moh_jax.ops.cross_entropy import (
  Columns,
  summed_cross_entropy,
  take,
  token_cross_entropy,
)


def columns_of(vocab: int, batch: int) -> Columns:
  """How the mesh splits a vocabulary.

  Args:
    vocab: V, its tokens.
    batch: B, examples of the batch that is computed.
  """
  axes = tuple(axes_of("vocab", vocab))
  batch_axes = axes_of("batch", batch)
  return Columns(axes, tuple(axis for axis in axes if axis in batch_axes))


def lookup(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Reads the vectors of tokens.

  Args:
    table: [V, C].
    tokens: [B, N] int32.
    dtype: of the result.

  Returns:
    [B, N, C].
  """
  columns = columns_of(len(table), len(tokens))
  if not columns.axes:
    vectors = take(columns, constrain(table, None, None), tokens, dtype)
    return constrain(vectors, "batch", "tokens", None)
  rest = tuple(axis for axis in columns.axes if axis not in columns.shared)

  def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
    rows = take(columns, table, tokens, dtype)
    return jax.lax.psum(rows, rest) if rest else rows

  names = (("vocab", None), ("batch", "tokens"))
  out = ("batch", "tokens", None)
  return map_shards(
    local, (table, tokens), names, out, whole_mesh=True, checked=True
  )


def summed_nats(
  x: jax.Array,
  kernel: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  chunk: int,
) -> jax.Array:
  """Weighted sum of cross-entropies: `summed_cross_entropy`, on a mesh too.

  Each device sums over its own tokens, and the gradient of its columns of the
  kernel is summed over devices once. Left to itself, the compiler does that in
  every turn of the loop over the tokens.

  Args:
    x: [B, N, C] inputs of the output layer.
    kernel: [C, V].
    targets: [B, N] int32.
    weights: [B, N] float32, without gradient.
    chunk: tokens of each sequence at a time.

  Returns:
    [] float32.
  """
  batch, length = targets.shape
  vocab = kernel.shape[1]
  columns = columns_of(vocab, batch)
  devices = axes_of("devices")
  split = axes_of("batch", batch) | axes_of("tokens", length)
  split |= axes_of("vocab", vocab)
  # Devices that all compute the same share its weight.
  same = math.prod(devices.values()) // math.prod(split.values())

  def local(x, kernel, targets, weights):
    total = summed_cross_entropy(
      x, kernel, targets, weights / same, chunk, columns
    )
    return jax.lax.psum(total, tuple(devices)) if devices else total

  names = (*_NAMES, ("batch", "tokens"))
  arrays = (x, kernel, targets, weights)
  return map_shards(local, arrays, names, (), whole_mesh=True)


def token_nats(
  x: jax.Array, kernel: jax.Array, targets: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each token: `token_cross_entropy`, on a mesh too.

  Args:
    x: [B, N, C] inputs of the output layer.
    kernel: [C, V].
    targets: [B, N] int32.
    chunk: tokens of each sequence at a time.

  Returns:
    [B, N] float32 nats; and [B, N] bool, True if no logit is larger.
  """
  columns = columns_of(kernel.shape[1], len(targets))

  def local(x, kernel, targets):
    return token_cross_entropy(x, kernel, targets, chunk, columns)

  out = ("batch", "tokens")
  return map_shards(local, (x, kernel, targets), _NAMES, out, whole_mesh=True)


# Logical axes of x, the kernel and the targets.
_NAMES = (("batch", "tokens", None), (None, "vocab"), ("batch", "tokens"))
