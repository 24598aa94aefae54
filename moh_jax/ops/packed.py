"""Attention in blocks: some rows of one key/value head at a time.

Only the logits of the current blocks, [r, M], are ever in memory, in the
forward and the backward pass, so memory grows linearly with the sequence. A
loop over the key/value heads contains a loop over the blocks that read the
head. Its bounds come from the table, so pairs that no token chose cost nothing.
JAX cannot differentiate loops with such bounds, so the gradients are written
out; of the forward pass they need only each row's output and log-sum-exp
(FlashAttention, arXiv:2205.14135).

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, r rows of a step (of one or more blocks), L
leading keys that a step reads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moh_jax.ops.basics import (
  ATTENTION,
  einsum_float32,
  unnormalized_softmax,
)
from moh_jax.ops.call import Call
from moh_jax.ops.pairs import HeadBlocks, gather_rows, scatter_rows
from moh_jax.ops.target import target, vary_alike

# A causal step reads the keys up to its last token. Array sizes are static, so
# this number is rounded up to one of a few lengths, each compiled on its own.
_LENGTHS = 8
_MIN_LENGTH = 64


def packed_attention(
  call: Call, blocks: HeadBlocks, blocks_per_step: int = 1
) -> jax.Array:
  """Softmax attention of the (token, head) pairs in a table.

  Args:
    call: arrays; a bias is broadcastable to [B, H, N, M].
    blocks: the active pairs, in blocks of the key/value heads.
    blocks_per_step: blocks computed in one step, at most.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for inactive pairs and for queries that
    see no key.
  """
  bias = call.bias
  if bias is not None:
    sizes = call.queries, call.keys
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], *sizes))
  arrays = call.q, call.k, call.v
  if target().platform == "cpu":
    # XLA for CPUs copies whole 16-bit arrays in every iteration of a loop.
    arrays = (x.astype(jnp.float32) for x in arrays)
  inner = Call(*arrays, call.visible, call.scale, bias)
  return _packed(inner, blocks, blocks_per_step).astype(call.v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _packed(call, blocks, blocks_per_step):
  return _forward(call, blocks, blocks_per_step)[0]


def _forward(call, blocks, blocks_per_step):
  out, log_sums = checkpoint_name(
    _run(blocks_per_step, call, blocks), ATTENTION
  )
  return out, (call, blocks, out, log_sums)


def _backward(blocks_per_step, saved, grad):
  dq, dk, dv, dbias = _gradients(blocks_per_step, saved, grad)
  return Call(dq, dk, dv, None, saved[0].scale, dbias), None


_packed.defvjp(_forward, _backward)


def _run(blocks_per_step, call, blocks):
  problem, v = _Problem(call, blocks, blocks_per_step), call.v
  queries, keys, values = problem.by_head()

  def group(g: jax.Array, results: tuple) -> tuple:
    ours, theirs = keys[g], values[g]

    def work(rows: "_Rows", length: int, sums: tuple) -> tuple:
      logits = problem.logits(rows, rows.of(queries), ours[:length])
      weights, total, highest = unnormalized_softmax(
        logits, masked=not call.visible.everything or call.bias is not None
      )
      out = einsum_float32(
        "rm,md->rd", weights.astype(v.dtype), theirs[:length]
      )
      log_sum = highest + jnp.log(total)
      return ((out / total).astype(v.dtype), log_sum[:, 0]), sums

    return problem.over_blocks(g, work, results, ())[0]

  results = (
    problem.no_rows(v.shape[-1:], v.dtype),
    problem.no_rows((), jnp.float32),
  )
  results = vary_alike(results, call)
  out, log_sums = lax.fori_loop(0, problem.groups, group, results)
  return scatter_rows(out, blocks), log_sums


def _gradients(blocks_per_step, saved, grad):
  call, blocks, out, log_sums = saved
  problem = _Problem(call, blocks, blocks_per_step)
  q, k, v, bias = call.q, call.k, call.v, call.bias
  queries, keys, values = problem.by_head()
  inner = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  grads, inner = (gather_rows(x, blocks) for x in (grad, inner))

  def group(g: jax.Array, carry: tuple) -> tuple:
    dq, dk, dv, dbias = carry
    ours, theirs = keys[g], values[g]

    def work(rows: "_Rows", length: int, sums: tuple) -> tuple:
      dk, dv, dbias = sums
      query, dout = rows.of(queries), rows.of(grads)
      logits = problem.logits(rows, query, ours[:length])
      weights = jnp.exp(logits - rows.of(log_sums)[:, None])
      dv = _add_product(dv, dout, weights.astype(dout.dtype))
      dweights = einsum_float32("rd,md->rm", dout, theirs[:length])
      dlogits = weights * (dweights - rows.of(inner)[:, None])
      if dbias is not None:
        fill = dbias.shape[-1] - length
        added = jnp.pad(dlogits, ((0, 0), (0, fill)))
        dbias = dbias.at[problem.bias_rows(rows)].add(added)
      dlogits = (dlogits * call.scale).astype(q.dtype)
      dk = _add_product(dk, query, dlogits)
      dq = einsum_float32("rm,md->rd", dlogits, ours[:length]).astype(q.dtype)
      return (dq,), (dk, dv, dbias)

    none = vary_alike(jnp.zeros(ours.shape[::-1], jnp.float32), dk)
    (dq,), sums = problem.over_blocks(g, work, (dq,), (none, none, dbias))
    dk = dk.at[g].set(sums[0].astype(k.dtype))
    dv = dv.at[g].set(sums[1].astype(v.dtype))
    return dq, dk, dv, sums[2]

  start = (
    problem.no_rows(q.shape[-1:], q.dtype),
    jnp.zeros_like(keys.swapaxes(1, 2)),
    jnp.zeros_like(values.swapaxes(1, 2)),
    None if bias is None else jnp.zeros(bias.shape, jnp.float32),
  )
  start = vary_alike(start, call)
  dq, dk, dv, dbias = lax.fori_loop(0, problem.groups, group, start)
  if bias is not None:
    dbias = dbias.astype(bias.dtype)
  dq, batch = scatter_rows(dq, blocks), len(q)
  dk, dv = _from_heads(dk, batch), _from_heads(dv, batch)
  return dq, dk, dv, dbias


@dataclasses.dataclass(frozen=True)
class _Problem:
  """One call: the loop over its blocks, and the logits of a step."""

  call: Call
  blocks: HeadBlocks
  blocks_per_step: int

  def by_head(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of queries [T * R, D]; keys and values [B * K, M, D]."""
    keys, values = (
      x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])
      for x in (self.call.k, self.call.v)
    )
    return gather_rows(self.call.q, self.blocks), keys, values

  # Blocks of one step at most, and key/value heads of the whole batch.
  max_count = property(
    lambda self: min(self.blocks_per_step, len(self.blocks.token))
  )
  groups = property(lambda self: self.call.batch * self.call.kv_heads)

  def no_rows(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros for all rows, plus the rows a last step may write past the end."""
    blocks, rows = self.blocks.token.shape
    return jnp.zeros(((blocks + self.max_count - 1) * rows, *shape), dtype)

  def over_blocks(
    self, group: jax.Array, work: Callable, results: tuple, sums: tuple
  ) -> tuple[tuple, tuple]:
    """Loops over all blocks that read a key/value head.

    Args:
      group: index of the key/value head, b * K + k.
      work: (rows, L, sums) -> (values of these rows, new sums).
      results: arrays of values of all rows [T * R, ...]; a step writes its own.
      sums: arrays that every step adds to.

    Returns:
      The results and sums after the loop.
    """
    table = self.blocks
    end = table.first[group + 1]
    lengths = self._lengths()
    width = table.token.shape[1]

    def program(count: int, length: int, t: jax.Array, sums: tuple) -> tuple:
      token = lax.dynamic_slice_in_dim(table.token, t, count).reshape(-1)
      rows = _Rows(t * width, group // self.call.kv_heads, token)
      values, sums = work(rows, length, sums)
      # Every branch returns the same shape. Rows of padding are written too,
      # and overwritten by the next step.
      fill = (0, (self.max_count - count) * width)
      pad = lambda x: jnp.pad(x, (fill, *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
      return (jax.tree.map(pad, values) if fill[1] else values), sums

    programs = [
      functools.partial(program, count + 1, length)
      for count in range(self.max_count)
      for length in lengths
    ]

    def step(state: tuple) -> tuple:
      t, results, sums = state
      left = end - t
      # Steps of nearly equal size: 9 blocks, at most 8 per step, are 5 and 4.
      count = -(-left // -(-left // self.max_count))
      index = (count - 1) * len(lengths)
      if len(lengths) > 1:  # by the last key that a causal row may see
        token, queries = table.token[t + count - 1], self.call.queries
        last = jnp.where(token < queries, token, 0).max()
        last = jnp.maximum(last + self.call.keys - queries, 0)
        index += last // lengths[0]
      if len(programs) > 1:
        values, sums = lax.switch(index, programs, t, sums)
      else:
        values, sums = programs[0](t, sums)
      results = jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, t * width, 0),
        results,
        values,
      )
      return t + count, results, sums

    state = (table.first[group], results, sums)
    return lax.while_loop(lambda state: state[0] < end, step, state)[1:]

  def _lengths(self) -> list[int]:
    """Values of L that are compiled, ascending."""
    keys = self.call.keys
    if not self.call.visible.causal or keys < 2 * _MIN_LENGTH:
      return [keys]
    step = max(_MIN_LENGTH, -(-keys // _LENGTHS))
    return [min(end, keys) for end in range(step, keys + step, step)]

  def logits(
    self, rows: "_Rows", query: jax.Array, keys: jax.Array
  ) -> jax.Array:
    """Logits of rows and the first L keys, [r, L] float32; -inf if hidden."""
    logits = einsum_float32("rd,md->rm", query, keys) * self.call.scale
    length = len(keys)
    if self.call.bias is not None:
      logits = logits + self.call.bias[self.bias_rows(rows)][:, :length]
    if self.call.visible.everything:
      return logits
    row = rows.batch
    seen = jnp.ones((1, length), bool)
    if self.call.visible.key_mask is not None:
      seen = seen & self.call.visible.key_mask[row, None, :length]
    if self.call.visible.segments is not None:
      segments = self.call.visible.segments[row]
      own = jnp.take(segments, rows.token, mode="clip")
      seen = seen & (own[:, None] == segments[None, :length])
    if self.call.visible.causal:
      last = rows.token + self.call.keys - self.call.queries
      seen = seen & (jnp.arange(length)[None] <= last[:, None])
    return jnp.where(seen, logits, -jnp.inf)

  def bias_rows(self, rows: "_Rows") -> tuple:
    """Index of the rows' part of the bias, [r, M]."""
    batch, heads = self.call.bias.shape[:2]
    row = rows.batch if batch > 1 else 0
    head = 0
    if heads > 1:
      head = jnp.maximum(rows.of(self.blocks.pair), 0) % heads
    # Empty rows read the last token's bias; their gradients are 0.
    return row, head, jnp.minimum(rows.token, self.call.queries - 1)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The rows of one step, all of one key/value head."""

  start: jax.Array  # [] int32, the first row
  batch: jax.Array  # [] int32, b
  token: jax.Array  # [r] int32, N in empty rows

  def of(self, x: jax.Array) -> jax.Array:
    """Takes these rows out of all rows."""
    return lax.dynamic_slice_in_dim(x, self.start, len(self.token))


def _from_heads(x: jax.Array, batch: int) -> jax.Array:
  """Reorders [B * K, D, M] to [B, M, K, D]."""
  return jnp.moveaxis(x.reshape(batch, -1, *x.shape[1:]), -1, 1)


def _add_product(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Adds a^T b, of a [r, D] and b [r, L], to the first L columns [D, M]."""
  # XLA for CPUs takes twice as long for a product that contracts rows. The
  # barrier keeps it from merging this transposition of the small operand.
  part = einsum_float32("dr,rm->dm", lax.optimization_barrier(a.T), b)
  # Not total.at[...].add: of a slice it is a scatter with an empty array of
  # indices, a constant that XLA of jax 0.11.2 crashes on under shard_map.
  part = part + total[:, : part.shape[1]]
  return lax.dynamic_update_slice_in_dim(total, part, 0, 1)
