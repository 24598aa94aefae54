"""The active (token, head) pairs as rows of a matrix, in blocks of one head.

A layer that activates k of its heads per token has exactly B * N * k active
(token, head) pairs. They become rows of a matrix, sorted by head, then by
token; each head is filled up with empty rows to whole blocks. The number of
blocks has a static bound, so no pair is dropped and shapes never depend on the
router. How many blocks are used is an array value at which loops stop. The
bound holds because `ActiveHeads.bounded` cuts tokens that have more heads than
they may, and makes their output NaN.

For instance, with blocks of 2 rows, tokens 0, 1 and 3 on head 0 and token 2 on
head 1 are the blocks [0, 1], [3, empty] and [2, empty].

Shapes: B batch, N tokens, H heads, T blocks, R rows of a block, X rows.
"""

import dataclasses

import chex
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
    parts: key/value heads of each of which a token has at most
      max_per_token / parts query heads, static, see `ops.picked_heads`; 1
      where it may have any.
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
class PairRows:
  """Which (token, head) pair each row of a matrix holds, and the inverse.

  Attributes:
    pair: [X] int32 pair of each row, (b * N + n) * H + h; -1 in empty rows.
    row: [B, N, H] int32 row of each pair; X for inactive pairs.
    active: [B, N, H] bool, False for inactive pairs.
  """

  pair: jax.Array
  row: jax.Array
  active: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBlocks(PairRows):
  """A table of (token, head) pairs in blocks of one head each; X is T * R.

  Attributes:
    token: [T, R] int32 token of each row, ascending within a head; N in empty
      rows, which stand at the end of a head's last block.
    head: [T] int32 head of each block, b * H + h; B * H - 1 for unused blocks.
    first: [B * H + 1] int32 first block of each head; the last entry is the
      number of used blocks.
    rank: [B, N, H] int32 pairs of a head up to and including a token's own.
  """

  token: jax.Array
  head: jax.Array
  first: jax.Array
  rank: jax.Array


def max_blocks(
  batch: int, tokens: int, heads: int, max_per_token: int, rows: int
) -> int:
  """Number of blocks that is enough for any choice of heads.

  Args:
    batch: B.
    tokens: N.
    heads: H.
    max_per_token: active heads of a token at most.
    rows: R.
  """
  pairs = tokens * min(max_per_token, heads)
  # At most one block per head has empty rows; no head has more than N pairs.
  blocks = min(pairs // rows + heads, heads * -(-tokens // rows))
  return batch * blocks


def head_blocks(active: ActiveHeads, rows: int) -> HeadBlocks:
  """Makes the table of the active pairs, by a counting sort.

  Args:
    active: the heads that each token uses.
    rows: R.
  """
  chex.assert_rank(active.mask, 3)
  batch, tokens, heads = active.mask.shape
  blocks = max_blocks(batch, tokens, heads, active.max_per_token, rows)
  rank = _rank(active.mask)
  used = -(-rank[:, -1].reshape(-1) // rows)
  first = _settled(jnp.cumsum(jnp.pad(used, (1, 0)), dtype=jnp.int32))
  start = first[:-1].reshape(batch, 1, heads) * rows
  pairs = _pair_rows(active.mask, start + rank - 1, blocks * rows)
  # A pair tells its token and its head: cheaper than to sort tokens and to
  # search for the head of each block.
  pair = pairs.pair.reshape(blocks, rows)
  empty = pair < 0
  # Of the pairs' dtype: with `jax_enable_x64` an int is int64.
  each, span = np.int32(heads), np.int32(tokens * heads)
  token = lax.rem(lax.div(pair, each), np.int32(tokens))
  token = jnp.where(empty, tokens, token)
  head = lax.div(pair, span) * each + lax.rem(pair, each)
  head = jnp.where(empty, batch * heads - 1, head).min(-1)
  return HeadBlocks(
    **vars(pairs), token=token, head=head, first=first, rank=rank
  )


def blocks_of(
  active: ActiveHeads | None, shape: tuple[int, int, int], rows: int
) -> HeadBlocks:
  """The table of the active pairs, or of all.

  Args:
    active: the heads that each token uses; None is every head.
    shape: (B, N, H).
    rows: R.
  """
  if active is not None:
    return head_blocks(active, rows)
  batch, tokens, heads = shape
  each = -(-tokens // rows)
  count = batch * heads
  head = jnp.arange(count, dtype=jnp.int32)
  token = jnp.arange(each * rows, dtype=jnp.int32)
  inside = token < tokens
  pair = head // heads * (tokens * heads) + head % heads
  pair = pair[:, None] + token[None] * heads
  pair = jnp.where(inside[None], pair, -1)
  position = jnp.arange(tokens, dtype=jnp.int32)[None, :, None]
  row = head.reshape(batch, 1, heads) * (each * rows) + position
  token = jnp.where(inside, token, tokens).reshape(each, rows)
  return HeadBlocks(
    pair=pair.reshape(-1),
    row=row,
    active=jnp.ones(row.shape, bool),
    token=jnp.tile(token, (count, 1)),
    head=jnp.repeat(head, each),
    first=jnp.arange(count + 1, dtype=jnp.int32) * each,
    rank=jnp.broadcast_to(position + 1, row.shape),
  )


def sequence_rows(
  active: ActiveHeads, group: int = 1
) -> tuple[PairRows, jax.Array]:
  """Makes the table of the active pairs with one range of rows per group.

  Rows of a range are filled from its start, sorted by token, then by head.

  Args:
    active: the heads that each token uses.
    group: G, neighbouring heads that share a range; a divisor of H.

  Returns:
    The table, whose X rows are B * H / G ranges of equal length,
    N * min(G, active.max_per_token); and the rows used of each, [B * H / G]
    int32.
  """
  batch, tokens, heads = active.mask.shape
  groups = heads // group
  span = tokens * min(group, active.max_per_token)

  def swapped(x: jax.Array, *shape: int) -> jax.Array:
    return x.reshape(batch, tokens, *shape).swapaxes(2, 3)

  mask = swapped(active.mask, groups, group).reshape(batch, -1, groups)
  rank = _rank(mask)
  start = jnp.arange(batch * groups, dtype=jnp.int32) * span
  row = start.reshape(batch, 1, groups) + rank - 1
  row = swapped(row, group, groups).reshape(active.mask.shape)
  table = _pair_rows(active.mask, row, batch * groups * span)
  return table, rank[:, -1].reshape(-1)


def _rank(active: jax.Array) -> jax.Array:
  """Counts active pairs along axis 1, up to and including each, as int32."""
  return _settled(jnp.cumsum(active, axis=1, dtype=jnp.int32))


def _settled(sums: jax.Array) -> jax.Array:
  """Keeps cumulative sums from being computed within what reads them.

  XLA for GPUs would sum up again for every element that `scatter_rows` moves.
  """
  return lax.optimization_barrier(sums)


def _pair_rows(active: jax.Array, row: jax.Array, total: int) -> PairRows:
  """Makes the table of X = total rows from the rows of the active pairs."""
  row = jnp.where(active, row, total)
  pairs = jnp.arange(active.size, dtype=jnp.int32)
  pair = jnp.full(total, -1, jnp.int32)
  pair = pair.at[row.reshape(-1)].set(pairs, mode="drop")
  return PairRows(pair, row, active)


@jax.custom_vjp
def gather_rows(x: jax.Array, rows: PairRows) -> jax.Array:
  """Reorders pairs [B, N, H, ...] to rows [X, ...]; 0 in empty rows."""
  return _take(x.reshape(-1, *x.shape[3:]), rows.pair, rows.pair >= 0)


@jax.custom_vjp
def scatter_rows(x: jax.Array, rows: PairRows) -> jax.Array:
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
