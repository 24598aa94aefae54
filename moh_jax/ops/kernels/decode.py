"""Attention of one new token to a cache, which reads the heads that it chose.

The cache is read in place, by the kernels of longer sequences: a key/value
head of a text, or one of several parts of its slots, counts as a text of one
head, and the query heads that read it are the tokens of that text. Heads that
no token chose have no rows in the table, so no program reads them.

Shapes: B texts, H query heads, K key/value heads, G query heads of a key/value
head, M slots, D head dim, S parts of the slots, X = B * K * S, R rows of a
block.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.head_blocks import (
  ActiveHeads,
  HeadBlocks,
  gather_rows,
  scatter_rows,
)
from moh_jax.ops.kernels.attention import (
  PLATFORMS,
  check_dtypes,
  check_platform,
  no_float16,
)
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import Tile, decode_tile
from moh_jax.ops.kernels.tpu_plan import LANES
from moh_jax.ops.visible import Visible

# Programs of a GPU that are at work: two to four for each of 132 processors.
_PROGRAMS = 512
_LEAST_SLOTS = 256  # of a part: to join parts costs as much as to read a few
# Rows of a block. A program has four warps whatever its rows are: of wide heads
# more than a few would not fit a GPU's registers and shared memory.
_MOST_ROWS, _MOST_WIDE_ROWS = 64, 16
_NARROW = 128  # head dim at most


def kernel_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  visible: jax.Array,
  active: ActiveHeads | None,
  scale: float,
  *,
  platform: str,
  splits: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of one token a text, without gradients.

  Sums are float32. Queries and cache are multiplied in the wider of their
  dtypes; a narrower cache is widened as it is read. TPUs have no float16: such
  a cache is copied whole.

  Args:
    q: [B, 1, H, D] bfloat16, float16 or float32.
    k: [B, K, M, D] likewise; query head h reads head h // (H / K).
    v: [B, K, M, D] in the dtype of k.
    visible: [B, 1, M] bool, the slots that the token may see.
    active: the heads at work; None is every head. A key/value head is read if
      any of its query heads is.
    scale: factor of the logits.
    platform: "gpu" (NVIDIA, Triton) or "tpu".
    splits: S, a divisor of M; None is `decode_splits` on a GPU, 1 on a TPU.
    interpret: runs the kernels on any device, slowly.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for heads that are not at work and for
    tokens that see no slot.

  Raises:
    ValueError: the platform, a dtype, the head dim or the splits are not
      supported.
  """
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  batch, _, heads, dim = q.shape
  kv_heads, slots = k.shape[1:3]
  chex.assert_shape(q, (batch, 1, heads, dim))
  chex.assert_shape(k, (batch, kv_heads, slots, dim))
  chex.assert_shape(visible, (batch, 1, slots))
  check_platform(platform)
  check_dtypes(q=q, k=k, v=v)
  dtype, out_dtype = jnp.promote_types(q.dtype, k.dtype), q.dtype
  if platform == "tpu":
    dtype = no_float16(dtype)
    k, v = (x.astype(no_float16(x.dtype)) for x in (k, v))
  if splits is None:
    most = kv_heads if active is None else min(kv_heads, active.most)
    splits = decode_splits(batch * most, slots) if platform == "gpu" else 1
  if splits < 1 or slots % splits:
    raise ValueError(f"splits={splits} must divide the {slots} slots")
  shape = batch, kv_heads, splits, heads // kv_heads
  chosen = None
  at_work = jnp.ones((batch, kv_heads), bool)
  if active is not None:
    chex.assert_shape(active.mask, (batch, 1, heads))
    chosen = active.mask.reshape(batch, kv_heads, -1)
    at_work = chosen.any(-1)

  def of_parts(x: jax.Array) -> jax.Array:
    """[B or 1, K or 1, S or 1, ...] to [X, ...]."""
    each = jnp.broadcast_to(x, (*shape[:3], *x.shape[3:]))
    return each.reshape(-1, *x.shape[3:])

  tile = decode_tile(platform, dim, dtype)
  most_rows = _MOST_ROWS if dim <= _NARROW else _MOST_WIDE_ROWS
  rows = pl.next_power_of_2(max(tile.rows, min(shape[3], most_rows)))
  tile = dataclasses.replace(tile, rows=rows)
  if platform == "tpu":
    tile = _that_pads_nothing(tile, slots // splits)
  blocks = _blocks(of_parts(at_work[:, :, None]), shape[3], rows)
  # [X, M / S, 1, D], the same bytes.
  k, v = (x.reshape(-1, slots // splits, 1, dim) for x in (k, v))
  slots_of_parts = visible.reshape(batch, 1, splits, -1)
  problem = Problem(
    k.shape,
    dtype,
    Visible(key_mask=of_parts(slots_of_parts)),
    blocks,
    float(scale),
    interpret,
    cached=True,
  )
  queries = q.astype(dtype).reshape(batch, kv_heads, 1, -1, 1, dim)
  out, log_sums = PLATFORMS[platform].forward(
    problem, gather_rows(of_parts(queries), blocks), k, v, tile
  )
  out = _joined(
    scatter_rows(out, blocks, 1).reshape(*shape, dim),
    scatter_rows(log_sums, blocks, 1).reshape(shape),
    slots_of_parts.any(-1)[..., None],
  )  # [B, K, G, D]
  if chosen is not None:
    out = jnp.where(chosen[..., None], out, 0.0)
  return out.astype(out_dtype).reshape(q.shape)


def decode_splits(heads: int, slots: int) -> int:
  """Parts of the slots that programs of a GPU share, so that few heads fill it.

  Args:
    heads: (text, key/value head) pairs at work.
    slots: M.

  Returns:
    A divisor of M; 1 where there are heads enough, slots are few, or nothing
    else divides them.
  """
  most = max(1, min(_PROGRAMS // heads, slots // _LEAST_SLOTS))
  return max(parts for parts in range(1, most + 1) if slots % parts == 0)


def _that_pads_nothing(tile: Tile, slots: int) -> Tile:
  """With as many keys as divide the slots, as TPUs pad the last block.

  Where more slots than a tile's are no multiple of LANES, nothing helps: then
  the cache is copied.
  """
  if slots <= tile.keys:
    return dataclasses.replace(tile, keys=slots)
  if slots % LANES:
    return tile
  sizes = range(LANES, tile.keys + 1, LANES)
  return dataclasses.replace(
    tile, keys=max(size for size in sizes if slots % size == 0)
  )


def _blocks(at_work: jax.Array, tokens: int, rows: int) -> HeadBlocks:
  """The table of every token of some texts of one head each.

  It is made in fewer steps than `head_blocks`, which sorts tokens too: next to
  the attention of one token every small kernel counts.

  Args:
    at_work: [X] bool, the texts.
    tokens: G.
    rows: R.
  """
  count, each = len(at_work), -(-tokens // rows)
  ended = jnp.cumsum(at_work, dtype=jnp.int32)
  index = jnp.arange(count, dtype=jnp.int32)
  # The text of a place: how many end before it.
  text = (ended <= index[:, None]).sum(-1, dtype=jnp.int32)
  text = jnp.minimum(text, count - 1)
  token = jnp.arange(each * rows, dtype=jnp.int32)
  token = jnp.where((index < ended[-1])[:, None], token, tokens)
  row = jnp.arange(tokens, dtype=jnp.int32)
  row = (ended[:, None] - 1) * (each * rows) + row
  return HeadBlocks(
    token=jnp.minimum(token, tokens).reshape(-1, rows),
    head=jnp.repeat(text, each),
    first=jnp.concatenate([jnp.zeros(1, jnp.int32), ended]) * each,
    row=jnp.where(at_work[:, None], row, count * each * rows),
  )


def _joined(out: jax.Array, log_sums: jax.Array, seen: jax.Array) -> jax.Array:
  """One softmax of those of parts.

  Args:
    out: [B, K, S, G, D] float32.
    log_sums: [B, K, S, G] log-sum-exp in base 2; any number where a part has
      no visible slot.
    seen: [B, 1, S, 1] bool, whether it has one.

  Returns:
    [B, K, G, D]; 0 where no part has one.
  """
  log_sums = jnp.where(seen, log_sums, -jnp.inf)
  most = log_sums.max(2, keepdims=True)
  # With no part at all, any finite number keeps exp2(-inf) = 0.
  weights = jnp.exp2(log_sums - jnp.where(most == -jnp.inf, 0.0, most))
  total = weights.sum(2, keepdims=True)
  weights = weights / jnp.where(total > 0, total, 1.0)
  return (out * weights[..., None]).sum(2)
