"""The active (token, head) pairs as rows of a matrix, in blocks of one head.

A layer that activates k of its heads per token has exactly B * N * k active
(token, head) pairs. They become rows of a matrix, sorted by head, then by
token; each head is filled up with empty rows to whole blocks. The number of
blocks has a static bound, so no pair is dropped and shapes never depend on the
router. How many blocks are used is an array value at which loops stop.

For instance, with blocks of 2 rows, tokens 0, 1 and 3 on head 0 and token 2 on
head 1 are the blocks [0, 1], [3, empty] and [2, empty].

Shapes: B batch, N tokens, H heads, T blocks, R rows of a block.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp


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
  """

  mask: jax.Array
  max_per_token: int = dataclasses.field(metadata={"static": True})
  expected: float | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  @property
  def share(self) -> float:
    """Expected share of the heads that are active."""
    heads = self.mask.shape[-1]
    expected = self.max_per_token if self.expected is None else self.expected
    return min(1.0, expected / heads)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBlocks:
  """A table of (token, head) pairs in blocks of one head each.

  Attributes:
    token: [T, R] int32 token of each row, ascending within a head; N in empty
      rows, which stand at the end of a head's last block.
    head: [T] int32 head of each block, b * H + h; B * H - 1 for unused blocks.
    first: [B * H + 1] int32 first block of each head; the last entry is the
      number of used blocks.
    row: [B * H, N] int32 row (of T * R) of each pair; T * R for inactive pairs.
  """

  token: jax.Array
  head: jax.Array
  first: jax.Array
  row: jax.Array


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

  Raises:
    ValueError: `rows` or `active.max_per_token` is below 1.
  """
  chex.assert_rank(active.mask, 3)
  limit = active.max_per_token
  if rows < 1 or limit < 1:
    raise ValueError(
      f"rows={rows} and max_per_token={limit} must be at least 1"
    )
  batch, tokens, heads = active.mask.shape
  blocks = max_blocks(batch, tokens, heads, limit, rows)
  mask = active.mask.swapaxes(1, 2).reshape(-1, tokens)
  rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
  used = -(-rank[:, -1] // rows)
  first = jnp.concatenate(
    [jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)]
  )
  total = blocks * rows
  row = jnp.where(mask, first[:-1, None] * rows + rank - 1, total)
  position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), row.shape)
  token = jnp.full(total, tokens, jnp.int32)
  token = token.at[row.reshape(-1)].set(position.reshape(-1), mode="drop")
  # A block's head is the number of heads that end at or before it.
  ended = first[None, 1:] <= jnp.arange(blocks, dtype=jnp.int32)[:, None]
  head = jnp.minimum(ended.sum(-1, dtype=jnp.int32), batch * heads - 1)
  return HeadBlocks(token.reshape(blocks, rows), head, first, row)


def all_blocks(batch: int, tokens: int, heads: int, rows: int) -> HeadBlocks:
  """Makes the table of every token with every head."""
  each = -(-tokens // rows)
  count = batch * heads
  token = jnp.arange(each * rows, dtype=jnp.int32).reshape(each, rows)
  token = jnp.tile(jnp.minimum(token, tokens), (count, 1))
  index = jnp.arange(count, dtype=jnp.int32)
  position = jnp.arange(tokens, dtype=jnp.int32)
  row = index[:, None] * each * rows + position[None]
  return HeadBlocks(
    token=token,
    head=jnp.repeat(index, each),
    first=jnp.arange(count + 1, dtype=jnp.int32) * each,
    row=row,
  )


@jax.custom_vjp
def gather_rows(x: jax.Array, blocks: HeadBlocks) -> jax.Array:
  """Reorders pairs [B, N, H, ...] to rows [T * R, ...]; 0 in empty rows."""
  batch, tokens, heads = x.shape[:3]
  flat = x.swapaxes(1, 2).reshape(batch * heads * tokens, *x.shape[3:])
  empty = blocks.token == tokens
  index = blocks.head[:, None] * tokens + blocks.token
  index = jnp.where(empty, len(flat), index).reshape(-1)
  return jnp.take(flat, index, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scatter_rows(rows: jax.Array, blocks: HeadBlocks, heads: int) -> jax.Array:
  """Reorders rows [T * R, ...] to pairs [B, N, H, ...]; 0 if inactive."""
  out = jnp.take(rows, blocks.row, axis=0, mode="fill", fill_value=0)
  return out.reshape(-1, heads, *out.shape[1:]).swapaxes(1, 2)


# Each function is the other's inverse, and so the other's gradient. Autodiff
# would use a scatter-add instead, which adds rows one by one.
def _gather_forward(x: jax.Array, blocks: HeadBlocks) -> tuple:
  # Residuals must be arrays: the number of heads is the length of an empty one.
  return gather_rows(x, blocks), (blocks, jnp.zeros((x.shape[2], 0)))


def _gather_backward(saved: tuple, grad: jax.Array) -> tuple:
  blocks, heads = saved
  return scatter_rows(grad, blocks, len(heads)), None


def _scatter_forward(rows: jax.Array, blocks: HeadBlocks, heads: int) -> tuple:
  return scatter_rows(rows, blocks, heads), blocks


def _scatter_backward(heads: int, blocks: HeadBlocks, grad: jax.Array) -> tuple:
  return gather_rows(grad, blocks), None


gather_rows.defvjp(_gather_forward, _gather_backward)
scatter_rows.defvjp(_scatter_forward, _scatter_backward)
