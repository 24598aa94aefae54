"""The active (token, head) pairs as rows of a matrix, in blocks.

A layer that activates k of its heads per token has exactly B * N * k active
(token, head) pairs. They become rows of a matrix, sorted by the key/value head
that they read, then by token, then by head; the rows of a key/value head are
filled up with empty ones to whole blocks. The number of blocks has a static
bound, so no pair is dropped and shapes never depend on the router. How many
blocks are used is an array value at which loops stop. The bound holds because
`ActiveHeads.bounded` cuts tokens that have more heads than they may, and makes
their output NaN.

For instance, with blocks of 2 rows, tokens 0, 1 and 3 on head 0 and token 2 on
head 1 are the blocks [0, 1], [3, empty] and [2, empty]; if both heads read one
key/value head, the blocks [0, 1] and [2, 3].

Shapes: B batch, N tokens, H query heads, K key/value heads, G query heads of a
key/value head, T blocks, R rows of a block, X rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActiveHeads:
  """The heads that each token uses.

  Attributes:
    mask: [B, N, H] bool, True for active heads.
    max_per_token: active heads that any one token has at most, static.
    expected: active heads that tokens have on average, static; None is
      `max_per_token`. On a mesh a device's heads are picked by some tokens more
      often than by others.
    parts: K where a token has at most max_per_token / K query heads of each
      key/value head, static, see `layers.attend`; 1 where it may have any.
  """

  mask: jax.Array
  max_per_token: int = dataclasses.field(metadata={"static": True})
  expected: float | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  parts: int = dataclasses.field(default=1, metadata={"static": True})

  @property
  def share(self) -> float:
    """Expected share of the heads that are active."""
    heads = self.mask.shape[-1]
    expected = self.max_per_token if self.expected is None else self.expected
    return min(1.0, expected / heads)

  def bounded(self) -> tuple["ActiveHeads", jax.Array | float]:
    """Cuts tokens to `max_per_token` heads, the most that tables have room for.

    Returns:
      The heads, the first ones of the layer for a token that has too many; and
      a factor for the output, [B, 1, 1, 1] or 1: NaN for sequences with such a
      token, so that neither their output nor gradients pass for right, else 1.
    """
    most, heads = self.max_per_token, self.mask.shape[-1]
    if most >= heads:
      return self, 1.0
    over = self.mask.sum(-1, keepdims=True) > most
    mask = jnp.where(over, jnp.arange(heads)[None, None] < most, self.mask)
    factor = jnp.where(over.any(1, keepdims=True)[..., None], jnp.nan, 1.0)
    return dataclasses.replace(self, mask=mask), factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBlocks:
  """A table of (token, head) pairs as X = T * R rows, and the inverse.

  A block has rows of one key/value head.

  Attributes:
    pair: [X] int32 pair of each row, (b * N + n) * H + h; -1 in empty rows.
    row: [B, N, H] int32 row of each pair; X for inactive pairs.
    active: [B, N, H] bool, False for inactive pairs.
    token: [T, R] int32 token of each row, ascending within a key/value head; N
      in empty rows, which stand at the end of its last block.
    head: [T] int32 key/value head of each block, b * K + k; B * K - 1 for
      unused blocks.
    first: [B * K + 1] int32 first block of each key/value head; the last entry
      is the number of used blocks.
    rank: [B, N, K] int32 pairs of a key/value head up to and including those of
      a token.
  """

  pair: jax.Array
  row: jax.Array
  active: jax.Array
  token: jax.Array
  head: jax.Array
  first: jax.Array
  rank: jax.Array

  def batches(self) -> jax.Array:
    """Example of the batch that each block is of, [T] int32."""
    return lax.div(self.head, np.int32(self.rank.shape[2]))


def head_blocks(active: ActiveHeads, rows: int, group: int = 1) -> HeadBlocks:
  """Makes the table of the active pairs, by a counting sort.

  Args:
    active: the heads that each token uses.
    rows: R.
    group: G, neighbouring query heads that read one key/value head.
  """
  batch, tokens, heads = active.mask.shape
  kv_heads, per_token = heads // group, min(active.max_per_token, heads)
  # At most one block per key/value head has empty rows.
  most = kv_heads * -(-tokens * min(per_token, group) // rows)
  blocks = batch * min(tokens * per_token // rows + kv_heads, most)
  rank, place = _ranks(active.mask, group)
  used = -(-rank[:, -1].reshape(-1) // rows)
  first = _settled(jnp.cumsum(jnp.pad(used, (1, 0)), dtype=jnp.int32))
  start = first[:-1].reshape(batch, 1, kv_heads) * rows
  place = place + jnp.repeat(start, group, axis=-1)
  row = jnp.where(active.mask, place, blocks * rows)
  pair = jnp.full(blocks * rows, -1, jnp.int32)
  pairs = jnp.arange(row.size, dtype=jnp.int32)
  pair = pair.at[row.reshape(-1)].set(pairs, mode="drop")
  # A pair tells its token and its head: cheaper than to sort tokens and to
  # search for the head of each block.
  by_block = pair.reshape(blocks, rows)
  empty = by_block < 0
  # Of the pairs' dtype: with `jax_enable_x64` an int is int64.
  each, span = np.int32(heads), np.int32(tokens * heads)
  token = lax.rem(lax.div(by_block, each), np.int32(tokens))
  token = jnp.where(empty, tokens, token)
  head = lax.div(lax.rem(by_block, each), np.int32(group))
  head = lax.div(by_block, span) * np.int32(kv_heads) + head
  head = jnp.where(empty, batch * kv_heads - 1, head).min(-1)
  return HeadBlocks(pair, row, active.mask, token, head, first, rank)


def blocks_of(
  active: ActiveHeads | None,
  shape: tuple[int, int, int],
  rows: int,
  group: int = 1,
) -> HeadBlocks:
  """The table of the active pairs, or of all.

  Args:
    active: the heads that each token uses; None is every head.
    shape: (B, N, H).
    rows: R.
    group: G, neighbouring query heads that read one key/value head.
  """
  if active is not None:
    return head_blocks(active, rows, group)
  batch, tokens, heads = shape
  kv_heads = heads // group
  each = -(-tokens * group // rows)
  count = batch * kv_heads
  head = jnp.arange(count, dtype=jnp.int32)
  place = jnp.arange(each * rows, dtype=jnp.int32)
  token, inside = lax.div(place, np.int32(group)), place < tokens * group
  pair = head // kv_heads * (tokens * heads) + head % kv_heads * group
  pair = pair[:, None] + (token * heads + place % group)[None]
  pair = jnp.where(inside[None], pair, -1)
  position = jnp.arange(tokens, dtype=jnp.int32)[None, :, None]
  start = head.reshape(batch, 1, kv_heads) * (each * rows)
  row = jnp.repeat(start, group, axis=-1)
  own = jnp.arange(heads, dtype=jnp.int32) % group
  row = row + position * group + own[None, None]
  token = jnp.where(inside, token, tokens).reshape(each, rows)
  return HeadBlocks(
    pair=pair.reshape(-1),
    row=row,
    active=jnp.ones(row.shape, bool),
    token=jnp.tile(token, (count, 1)),
    head=jnp.repeat(head, each),
    first=jnp.arange(count + 1, dtype=jnp.int32) * each,
    rank=jnp.broadcast_to((position + 1) * group, (batch, tokens, kv_heads)),
  )


def _ranks(active: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
  """Counts the active pairs of groups of heads in the order of their rows.

  Args:
    active: [B, N, H] bool.
    group: G.

  Returns:
    The pairs of a group up to and including those of a token, [B, N, H / G]
    int32; and the pairs before each one, [B, N, H] int32, anything for inactive
    ones.
  """
  each = active.reshape(*active.shape[:2], -1, group)
  count = each.sum(-1, dtype=jnp.int32)
  rank = _settled(jnp.cumsum(count, axis=1, dtype=jnp.int32))
  # What comes after a pair of the same token, instead of before: 0 if G = 1.
  up_to = jnp.cumsum(each, axis=3, dtype=jnp.int32)
  later = (up_to[..., -1:] - up_to).reshape(active.shape)
  return rank, jnp.repeat(rank, group, axis=-1) - 1 - later


def _settled(sums: jax.Array) -> jax.Array:
  """Keeps cumulative sums from being computed within what reads them.

  XLA for GPUs would sum up again for every element that `scatter_rows` moves.
  """
  return lax.optimization_barrier(sums)


@jax.custom_vjp
def gather_rows(x: jax.Array, rows: HeadBlocks) -> jax.Array:
  """Reorders pairs [B, N, H, ...] to rows [X, ...]; 0 in empty rows."""
  return _take(x.reshape(-1, *x.shape[3:]), rows.pair, rows.pair >= 0)


@jax.custom_vjp
def scatter_rows(x: jax.Array, rows: HeadBlocks) -> jax.Array:
  """Reorders rows [X, ...] to pairs [B, N, H, ...]; 0 if inactive."""
  return _take(x, rows.row, rows.active)


def _take(x: jax.Array, index: jax.Array, inside: jax.Array) -> jax.Array:
  """Takes x[index] along the first axis, 0 where not inside."""
  out = jnp.take(x, index, axis=0, mode="clip")
  inside = inside.reshape(*inside.shape, *[1] * (x.ndim - 1))
  return jnp.where(inside, out, jnp.zeros((), x.dtype))


# Each function is the other's inverse, and so the other's gradient. Autodiff
# would use a scatter-add instead, which adds rows one by one.
gather_rows.defvjp(
  lambda x, rows: (gather_rows(x, rows), rows),
  lambda rows, grad: (scatter_rows(grad, rows), None),
)
scatter_rows.defvjp(
  lambda x, rows: (scatter_rows(x, rows), rows),
  lambda rows, grad: (gather_rows(grad, rows), None),
)
