"""A large vocabulary: its parts on the devices of a mesh, and cross-entropy.

An output layer and an embedding have a column, or a row, for every token. Where
devices hold different ones (`Columns`), each computes its part of the logits
for the examples of all of them, and sums over the vocabulary are sums over
devices, under `jax.shard_map`.

The logits of a whole batch, [B, N, V] float32, would be the largest array of a
language model by far. Here only those of `chunk` tokens of each sequence exist
at a time, and only in the forward pass: it computes the gradients too, which is
possible because the loss is a weighted sum with known weights.

Shapes: B batch, N tokens, C width, V vocabulary, n tokens of a chunk. Inside, B
are the examples, and V the columns, that a device computes with.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.basics import einsum_float32
from moh_jax.ops.target import target


@dataclasses.dataclass(frozen=True)
class Columns:
  """Which mesh axes split a vocabulary; by default none does.

  Attributes:
    axes: mesh axes along which devices hold different columns.
    shared: those of them along which devices hold different examples too.
  """

  axes: tuple[str, ...] = ()
  shared: tuple[str, ...] = ()

  def gather(self, x: jax.Array) -> jax.Array:
    """The rows of all S devices along `shared`: [B, ...] to [S * B, ...]."""
    for axis in reversed(self.shared):
      x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    return x

  def scatter(self, x: jax.Array) -> jax.Array:
    """Sums over devices, and keeps its own rows: [S * B, ...] to [B, ...]."""
    for axis in self.shared:
      x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return x

  def own(self, x: jax.Array) -> jax.Array:
    """This device's rows of what it has for all: [S * B, ...] to [B, ...]."""
    if not self.shared:
      return x
    each = len(x) // jax.lax.axis_size(self.shared)
    return jax.lax.dynamic_slice_in_dim(
      x, jax.lax.axis_index(self.shared) * each, each
    )

  def sum(self, x: jax.Array) -> jax.Array:
    """Sums x over the parts of the vocabulary."""
    return jax.lax.psum(x, self.axes) if self.axes else x

  def max(self, x: jax.Array) -> jax.Array:
    """The largest x of all parts of the vocabulary."""
    return jax.lax.pmax(x, self.axes) if self.axes else x

  def place(self, tokens: jax.Array, size: int) -> jax.Array:
    """Index of tokens among this device's columns; -1 if another has them."""
    if not self.axes:
      return tokens
    place = tokens - jax.lax.axis_index(self.axes) * size
    return jnp.where((place >= 0) & (place < size), place, -1)

  def share(self, x: jax.Array) -> jax.Array:
    """This device's part of a sum that all parts of the vocabulary know."""
    return x / jax.lax.axis_size(self.axes) if self.axes else x


ALL = Columns()


def take(
  columns: Columns, table: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Reads rows of a table that devices share.

  Args:
    columns: how they share its rows.
    table: [v, C] the device's rows.
    tokens: [B, N] int32 of this device.
    dtype: of the result.

  Returns:
    [B, N, C] of this device, to be summed over the axes of the vocabulary that
    are not shared.
  """
  place = columns.place(columns.gather(tokens), len(table))
  take_rows = functools.partial(jnp.take, axis=0)
  read = _read_bits if table.dtype.itemsize == 2 else take_rows
  rows = read(table, place).astype(dtype)  # of -1 the last one
  if columns.axes:
    rows = jnp.where(place[..., None] >= 0, rows, 0)
  return columns.scatter(rows)


@jax.custom_jvp
def _read_bits(table: jax.Array, rows: jax.Array) -> jax.Array:
  """Reads 16-bit rows as integers.

  XLA's CPU compiler reads bfloat16 rows in float32, for which it converts the
  whole table; without the barrier it would do so before a loop of decoding.
  """
  table, rows = jax.lax.optimization_barrier((table, rows))
  bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
  return jax.lax.bitcast_convert_type(bits.take(rows, axis=0), table.dtype)


@_read_bits.defjvp
def _read_bits_jvp(primals, tangents) -> tuple[jax.Array, jax.Array]:
  table, rows = primals
  return _read_bits(table, rows), tangents[0].take(rows, axis=0)


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
  return *((cotangent * x).astype(x.dtype) for x in grads), None, None


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
    *_, nats, is_best = _softmax(part, kernel, target, columns)
    return columns.own(nats), columns.own(is_best)

  parts = _split(chunk, x, targets)
  joined = [_join(part) for part in jax.lax.map(one, parts)]
  length = targets.shape[1]
  return joined[0][:, :length], joined[1][:, :length]


def summed_divergence(
  student: tuple[jax.Array, jax.Array],
  teacher: tuple[jax.Array, jax.Array],
  weights: jax.Array,
  temperature: float,
  chunk: int,
) -> jax.Array:
  """Weighted sum of the divergences of two models' distributions.

  T^2 KL(teacher || student) of the logits over T (arXiv:1503.02531).

  Args:
    student: [B, N, C] inputs of the output layer, and its kernel [C, V].
    teacher: the same, without gradient.
    weights: [B, N] float32, without gradient.
    temperature: T.
    chunk: n; 0 takes all tokens at once.

  Returns:
    [] float32.
  """
  teacher = jax.lax.stop_gradient(teacher)
  (ours, theirs), kernels = zip(student, teacher)

  @jax.checkpoint
  def add(total: jax.Array, parts: tuple) -> tuple[jax.Array, None]:
    *inputs, weights = parts
    log_q, log_p = (
      jax.nn.log_softmax(
        einsum_float32("bnc,cv->bnv", x, kernel.astype(x.dtype)) / temperature
      )
      for x, kernel in zip(inputs, kernels)
    )
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return total + (weights * divergence).sum(), None

  parts = _split(chunk, ours, theirs, weights)
  total, _ = jax.lax.scan(add, jnp.zeros(()), parts)
  return temperature**2 * total


def _scan_chunks(
  x, kernel, targets, weights, chunk, columns, *, gradients: bool
):
  rounded = kernel.astype(x.dtype)

  def one(carry: tuple, parts: tuple) -> tuple:
    total, dkernel = carry
    part, target, weight = (columns.gather(part) for part in parts)
    exps, sums, nats, _ = _softmax(part, rounded, target, columns)
    total = total + (nats * weight).sum()
    if not gradients:
      return (total, dkernel), None
    size = exps.shape[-1]
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


def _softmax(
  x: jax.Array, kernel: jax.Array, targets: jax.Array, columns: Columns
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """The output layer's softmax and what it says of the targets.

  Returns:
    Its numerators [B, n, V] and their sums over the vocabulary, the targets'
    cross-entropies, float32, and whether no logit is larger than theirs, [B, n]
    each.
  """
  logits = einsum_float32("bnc,cv->bnv", x, kernel)
  place = columns.place(targets, logits.shape[-1])
  picked = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
  if columns.axes:
    picked = columns.sum(jnp.where(place >= 0, picked, 0))
  highest = columns.max(logits.max(-1))
  exps = jnp.exp(logits - highest[..., None])
  if target().platform == "cpu":
    # For a sum, XLA would recompute all exponentials, on a single core.
    sums = jnp.einsum("bnv,v->bn", exps, jnp.ones_like(exps[0, 0]))
  else:
    sums = exps.sum(-1)
  sums = columns.sum(sums)
  return exps, sums, jnp.log(sums) + highest - picked, picked >= highest


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
