"""Attention of one new token to a cache, reading the active heads alone.

The cache is read in place, by the forward kernels of longer sequences. To them
each key/value head of a text is a sequence of its own, with one head, whose
tokens are the query heads that read it. On a GPU its slots may be split into S
ranges, each a sequence too: few heads would leave most processors idle.
Key/value heads that no query chose have no rows in the table, so no program
reads them.

Shapes: B texts, H query heads, K key/value heads, G query heads of a key/value
head, M slots, D head dim, S splits of the slots, X = B * K * S sequences, R
rows of a block.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.head_blocks import (
  ActiveHeads,
  HeadBlocks,
  scatter_rows,
)
from moh_jax.ops.kernels.attention import BACKENDS, forward_queries, readable
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import Tile, decode_tile
from moh_jax.ops.kernels.tpu_plan import LANES
from moh_jax.ops.visible import Visible

# Programs that fill a GPU: two to four for each of 132 processors.
_MAX_PROGRAMS = 512
_MIN_SLOTS = 256  # of a split: joining two costs as much as reading a few slots
# Rows of a block. A program has four warps whatever its rows are: more rows of
# wide heads would not fit a GPU's registers and shared memory.
_MAX_ROWS, _MAX_WIDE_ROWS = 64, 16
_WIDE = 128  # heads with a larger head dim are wide


def kernel_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  visible: jax.Array,
  active: ActiveHeads | None,
  scale: float,
  *,
  backend: str,
  splits: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of one new token per text, without gradients.

  Sums are float32. Queries and cache are multiplied in the wider of their
  dtypes; a narrower cache is widened as it is read. TPUs have no float16: a
  float16 cache is copied to float32 first.

  Args:
    q: [B, 1, H, D] bfloat16, float16 or float32.
    k: [B, K, M, D] in one of these dtypes; query head h reads key/value head
      h // (H / K).
    v: [B, K, M, D] in the dtype of k.
    visible: [B, 1, M] bool, the slots that the token may see.
    active: the active heads; None is every head. A key/value head is read if
      any of its query heads is active.
    scale: factor of the logits.
    backend: of Pallas, "triton" (NVIDIA GPUs) or "mosaic_tpu".
    splits: S, a divisor of M; None is `decode_splits` on a GPU, 1 on a TPU.
    interpret: runs the kernels in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot.

  Raises:
    ValueError: the back end, a dtype, the head dim or the splits are not
      supported.
  """
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  batch, _, heads, dim = q.shape
  kv_heads, slots = k.shape[1:3]
  chex.assert_shape(q, (batch, 1, heads, dim))
  chex.assert_shape(k, (batch, kv_heads, slots, dim))
  chex.assert_shape(visible, (batch, 1, slots))
  dtype, k, v = readable(backend, q, k, v)
  if splits is None:
    read = kv_heads
    if active is not None:
      read = min(kv_heads, active.max_per_token)
    splits = decode_splits(batch * read, slots) if backend == "triton" else 1
  if splits < 1 or slots % splits:
    raise ValueError(f"splits={splits} must divide the {slots} slots")
  shape = batch, kv_heads, splits, heads // kv_heads
  chosen = None
  is_read = jnp.ones((batch, kv_heads), bool)
  if active is not None:
    chex.assert_shape(active.mask, (batch, 1, heads))
    chosen = active.mask.reshape(batch, kv_heads, -1)
    is_read = chosen.any(-1)

  def per_sequence(x: jax.Array) -> jax.Array:
    """Broadcasts [B or 1, K or 1, S or 1, ...] to [X, ...]."""
    each = jnp.broadcast_to(x, (*shape[:3], *x.shape[3:]))
    return each.reshape(-1, *x.shape[3:])

  tile = decode_tile(backend, dim, dtype)
  max_rows = _MAX_ROWS if dim <= _WIDE else _MAX_WIDE_ROWS
  rows = pl.next_power_of_2(max(tile.rows, min(shape[3], max_rows)))
  tile = dataclasses.replace(tile, rows=rows)
  if backend == "mosaic_tpu":
    tile = _without_padding(tile, slots // splits)
  blocks = _whole_heads(per_sequence(is_read[:, :, None]), shape[3], rows)
  # [X, M / S, 1, D], without a copy: only the shape changes.
  k, v = (x.reshape(-1, slots // splits, 1, dim) for x in (k, v))
  visible = visible.reshape(batch, 1, splits, -1)
  problem = Problem(
    k.shape,
    dtype,
    Visible(key_mask=per_sequence(visible)),
    blocks,
    float(scale),
    interpret,
    out_dtype=jnp.float32,  # splits are joined before rounding
    head_dim_first=backend == "mosaic_tpu" and dim % LANES > 0,
  )
  queries = q.astype(dtype).reshape(batch, kv_heads, 1, -1, 1, dim)
  out, log_sums = BACKENDS[backend].forward(
    problem,
    forward_queries(backend, per_sequence(queries), blocks),
    (k, v),
    tile,
  )
  out = _join_splits(
    scatter_rows(out, blocks).reshape(*shape, dim),
    scatter_rows(log_sums, blocks).reshape(shape),
    visible.any(-1)[..., None],
  )  # [B, K, G, D]
  if chosen is not None:
    out = jnp.where(chosen[..., None], out, 0.0)
  return out.astype(q.dtype).reshape(q.shape)


def decode_splits(heads: int, slots: int) -> int:
  """Into how many ranges to split the slots so that few heads fill a GPU.

  Args:
    heads: (text, key/value head) pairs that are read.
    slots: M.

  Returns:
    S, a divisor of M; 1 where the heads fill the GPU alone, slots are few, or
    M has no suitable divisor. For instance 4 for 128 heads and 4,096 slots.
  """
  limit = max(1, min(_MAX_PROGRAMS // heads, slots // _MIN_SLOTS))
  return max(splits for splits in range(1, limit + 1) if slots % splits == 0)


def _without_padding(tile: Tile, slots: int) -> Tile:
  """Returns a TPU tile whose keys divide the slots.

  A last tile that is not full would need padding, which copies the cache. That
  remains so for more slots than a tile's if they are no multiple of LANES.
  """
  if slots <= tile.keys:
    return dataclasses.replace(tile, keys=slots)
  if slots % LANES:
    return tile
  sizes = range(LANES, tile.keys + 1, LANES)
  return dataclasses.replace(
    tile, keys=max(size for size in sizes if slots % size == 0)
  )


def _whole_heads(active: jax.Array, tokens: int, rows: int) -> HeadBlocks:
  """Makes the table of sequences with one head, used by all tokens or by none.

  It takes fewer operations than `head_blocks`, which sorts tokens too: beside
  the attention of a single token every small kernel counts.

  Args:
    active: [X] bool, the sequences whose head is active.
    tokens: tokens of each sequence.
    rows: R.
  """
  count, each = len(active), -(-tokens // rows)
  ended = jnp.cumsum(active, dtype=jnp.int32)
  index = jnp.arange(count, dtype=jnp.int32)
  # The i-th active sequence: how many sequences have at most i up to them.
  sequence = (ended[None] <= index[:, None]).sum(-1, dtype=jnp.int32)
  sequence = jnp.minimum(sequence, count - 1)
  token = jnp.arange(each * rows, dtype=jnp.int32)
  token = jnp.where((index < ended[-1])[:, None], token, tokens)
  token = jnp.minimum(token, tokens)
  pair = jnp.where(token < tokens, sequence[:, None] * tokens + token, -1)
  row = jnp.arange(tokens, dtype=jnp.int32)
  row = (ended[:, None] - 1) * (each * rows) + row[None]
  row = jnp.where(active[:, None], row, count * each * rows)
  return HeadBlocks(
    pair=pair.reshape(-1),
    row=row[..., None],
    rank=jnp.broadcast_to(
      active[:, None, None] * jnp.arange(1, tokens + 1)[None, :, None],
      (count, tokens, 1),
    ),
    active=jnp.broadcast_to(active[:, None, None], (count, tokens, 1)),
    token=token.reshape(-1, rows),
    head=jnp.repeat(sequence, each),
    first=jnp.concatenate([jnp.zeros(1, jnp.int32), ended]) * each,
  )


def _join_splits(
  out: jax.Array, log_sums: jax.Array, visible: jax.Array
) -> jax.Array:
  """Joins the softmax attentions over splits of the slots into one over all.

  Args:
    out: [B, K, S, G, D] float32 attention over each split.
    log_sums: [B, K, S, G] log-sum-exp in base 2; arbitrary for splits without
      a visible slot.
    visible: [B, 1, S, 1] bool, whether a split has a visible slot.

  Returns:
    [B, K, G, D]; 0 where no split has a visible slot.
  """
  log_sums = jnp.where(visible, log_sums, -jnp.inf)
  highest = log_sums.max(2, keepdims=True)
  # If no split has one, any finite shift keeps exp2(-inf) = 0.
  weights = jnp.exp2(log_sums - jnp.where(highest == -jnp.inf, 0.0, highest))
  total = weights.sum(2, keepdims=True)
  weights = weights / jnp.where(total > 0, total, 1.0)
  return (out * weights[..., None]).sum(2)
