"""Which head works on which token, as blocks of rows that share a head.

A layer that activates k of its heads per token has exactly B * N * k (token,
head) pairs at work. Here they become rows of a matrix: sorted by head, then by
position, every head filled up to whole blocks. The number of blocks has a
static bound, so nothing is dropped and shapes never depend on the router; how
many are in use is a number that loops stop at.

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
  """The heads at work.

  Attributes:
    mask: [B, N, H] bool, the heads that a token uses.
    most: heads of one token at most, a static bound.
  """

  mask: jax.Array
  most: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBlocks:
  """A table of (token, head) pairs in blocks of one head each.

  Attributes:
    token: [T, R] int32, tokens of a block in ascending order; N where a row is
      empty, which only rows at the end of a head's last block are.
    head: [T] int32, b * H + h of a block; the last one for unused blocks.
    first: [B * H + 1] int32, first block of every head; the last entry is the
      number of blocks in use.
    row: [B * H, N] int32, the row (of T * R) that a pair has; T * R for pairs
      that are not at work.
  """

  token: jax.Array
  head: jax.Array
  first: jax.Array
  row: jax.Array


def max_blocks(
  batch: int, tokens: int, heads: int, most: int, rows: int
) -> int:
  """Blocks that any choice of heads fits in.

  Args:
    batch: B.
    tokens: N.
    heads: H.
    most: heads of a token at most.
    rows: R.
  """
  pairs = tokens * min(most, heads)
  # A head fills one block less than whole at most, and has N pairs at most.
  whole = min(pairs // rows + heads, heads * -(-tokens // rows))
  return batch * whole


def head_blocks(active: ActiveHeads, rows: int) -> HeadBlocks:
  """Makes the table by a counting sort: prefix sums, no comparison.

  Args:
    active: the heads at work.
    rows: R.

  Raises:
    ValueError: rows or the bound is below 1.
  """
  chex.assert_rank(active.mask, 3)
  if rows < 1 or active.most < 1:
    raise ValueError(f"rows={rows} and most={active.most} must be at least 1")
  batch, tokens, heads = active.mask.shape
  blocks = max_blocks(batch, tokens, heads, active.most, rows)
  mask = active.mask.swapaxes(1, 2).reshape(-1, tokens)
  rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
  used = -(-rank[:, -1] // rows)
  first = jnp.concatenate(
    [jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)]
  )
  nowhere = blocks * rows
  row = jnp.where(mask, first[:-1, None] * rows + rank - 1, nowhere)
  position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), row.shape)
  token = jnp.full(nowhere, tokens, jnp.int32)
  token = token.at[row.reshape(-1)].set(position.reshape(-1), mode="drop")
  # The head of a block: how many heads end at or before it.
  ended = first[None, 1:] <= jnp.arange(blocks, dtype=jnp.int32)[:, None]
  head = jnp.minimum(ended.sum(-1, dtype=jnp.int32), batch * heads - 1)
  return HeadBlocks(token.reshape(blocks, rows), head, first, row)


def all_blocks(batch: int, tokens: int, heads: int, rows: int) -> HeadBlocks:
  """The table of every token with every head."""
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
  """Values of pairs [B, N, H, ...] as rows [T * R, ...]; empty ones are 0."""
  batch, tokens, heads = x.shape[:3]
  flat = x.swapaxes(1, 2).reshape(batch * heads * tokens, *x.shape[3:])
  empty = blocks.token == tokens
  index = blocks.head[:, None] * tokens + blocks.token
  index = jnp.where(empty, len(flat), index).reshape(-1)
  return jnp.take(flat, index, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scatter_rows(rows: jax.Array, blocks: HeadBlocks, heads: int) -> jax.Array:
  """Rows [T * R, ...] to pairs [B, N, H, ...]; 0 where none is at work."""
  out = jnp.take(rows, blocks.row, axis=0, mode="fill", fill_value=0)
  return out.reshape(-1, heads, *out.shape[1:]).swapaxes(1, 2)


# Either undoes the other, so each is the other's gradient too: autodiff would
# add to rows one by one what is a plain gather.
def _gather_forward(x: jax.Array, blocks: HeadBlocks) -> tuple:
  # An empty array that knows how many heads there are.
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
