"""Attention of one new token per text to a cache, in one kernel (Triton).

The slots that a text's token sees are cut into S splits, so that few heads
fill a GPU too. A program reads one split of one key/value head, tile by tile;
the splits are joined by their log-sum-exp. The softmax is in base 2, which the
hardware computes directly. Arrays in Triton have powers of two as sizes: loads
and stores beyond the ends of others are masked.

JAX is going to remove Pallas' back end Triton; then the dense form serves.

Shapes: B texts, K key/value heads, G query heads of a key/value head, M slots,
D head dim, L entries of a list of heads, S splits, T slots of a tile, R rows
(query heads) of a program.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.kernels.attention import (
  LOG2_E,
  MAX_HEAD_DIM,
  Tile,
  across,
  fitting,
  times,
)
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.target import Target

try:
  from jax.experimental.pallas import triton as plgpu
except ImportError:
  plgpu = None

# A token's rows are few, so only the slots of a tile matter.
TILES = {
  2: {64: Tile(16, 64, 3), 128: Tile(16, 64, 2), 256: Tile(16, 32, 2)},
  4: {64: Tile(16, 64, 2), 128: Tile(16, 32, 2), 256: Tile(16, 16, 2)},
}
_SMALLEST = 16  # smallest side of a matrix product in Triton
# Programs that fill a GPU: two to four for each of 132 processors.
_MAX_PROGRAMS = 512
_MIN_SLOTS = 256  # of a split: joining two costs as much as reading a few slots
_WARPS = 4
# Warps do not grow with the rows: more rows of wide heads would not fit a GPU's
# registers and shared memory.
_MAX_ROWS, _MAX_WIDE_ROWS = 64, 16
_WIDE = 128  # heads with a larger head dim are wide


def unable(device: Target, head_dim: int) -> str:
  """What the kernel needs of a device and of heads; empty if nothing.

  Args:
    device: the device; a CPU interprets the kernel.
    head_dim: D.
  """
  if plgpu is None:
    return f"Pallas' Triton, which jax {jax.__version__} lacks"
  if head_dim > MAX_HEAD_DIM:
    return f"a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}"
  return "" if device.platform == "cpu" else device.gpu_problem


@jax.enable_x64(False)  # indices in kernels are int32
def decode_attention(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  active: ActiveHeads | None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of one new token per text, without gradients.

  Sums are float32. Queries and keys are multiplied in the wider of their
  dtypes; a narrower cache is widened as it is read.

  Args:
    q: [B, 1, H, D] bfloat16, float16 or float32.
    cache: keys and values [B, K, M, D] in one of these dtypes; query head h
      reads key/value head h // (H / K).
    slots: which slots each token sees.
    active: the active heads; None is every head. A key/value head is read if
      any of its query heads is active.
    interpret: runs the kernel in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot, NaN for texts whose token has too many heads.
  """
  batch, _, heads, dim = q.shape
  kv_heads, most_slots = cache.k.shape[1:3]
  dtype = jnp.result_type(q, cache.k, cache.v)
  first = slots.first.astype(jnp.int32)
  end = jnp.broadcast_to(slots.start + 1, first.shape).astype(jnp.int32)
  shape = batch, kv_heads, heads // kv_heads, dim
  chosen = jnp.broadcast_to((first < end)[:, None, None], shape[:3])
  most, factor = kv_heads, 1.0
  if active is not None:
    active, factor = active.bounded()
    chosen = chosen & active.mask.reshape(shape[:3])
    most = min(kv_heads, active.max_per_token)
  bounds = jnp.maximum(first, 0), jnp.minimum(end, most_slots)
  launch = _Launch(shape, most_slots, most, dtype, interpret)
  heads, count = head_list(chosen.any(-1), most)
  out = launch.run(
    (heads, count, *bounds), q.astype(dtype).reshape(shape), cache
  )
  out = jnp.where(chosen[..., None], out, 0.0).astype(q.dtype)
  return factor * out.reshape(q.shape)


def head_list(is_read: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
  """Lists the key/value heads that each text reads, in linear time.

  Args:
    is_read: [B, K] bool.
    most: L, heads that any text reads at most.

  Returns:
    The heads that are read, ascending, then arbitrary ones, [B, L] int32; and
    how many of each text are read, [B] int32.
  """
  batch, heads = is_read.shape
  ended = jnp.cumsum(is_read, axis=1, dtype=jnp.int32)
  place = jnp.where(is_read, ended - 1, most)
  text = jnp.arange(batch, dtype=jnp.int32)[:, None]
  head = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), is_read.shape)
  empty = jnp.zeros((batch, most), jnp.int32)
  return empty.at[text, place].set(head, mode="drop"), ended[:, -1]


@dataclasses.dataclass(frozen=True)
class _Launch:
  """The launch of the kernel.

  Attributes:
    shape: (B, K, G, D).
    slots: M.
    entries: L.
    dtype: in which queries and keys are multiplied.
    interpret: whether the kernel runs in Pallas's interpreter.
  """

  shape: tuple[int, int, int, int]
  slots: int
  entries: int
  dtype: jnp.dtype
  interpret: bool

  @functools.cached_property
  def tile(self) -> Tile:
    """Sizes of a program's tile: R rows and T slots."""
    *_, group, dim = self.shape
    tile = fitting(TILES, dim, self.dtype)
    most = _MAX_ROWS if dim <= _WIDE else _MAX_WIDE_ROWS
    rows = pl.next_power_of_2(max(_SMALLEST, min(group, most)))
    slots = max(_SMALLEST, pl.next_power_of_2(self.slots))
    return tile._replace(rows=rows, keys=min(tile.keys, slots))

  @property
  def row_tiles(self) -> int:
    """Tiles of rows of a key/value head, G / R rounded up."""
    return pl.cdiv(self.shape[2], self.tile.rows)

  @property
  def grid(self) -> tuple[int, int, int]:
    """Programs: texts, entries of their lists by tiles of rows, splits."""
    batch, lists = self.shape[0], self.entries * self.row_tiles
    splits = min(_MAX_PROGRAMS // (batch * lists), self.slots // _MIN_SLOTS)
    return batch, lists, max(1, splits)

  @property
  def width(self) -> int:
    """Columns of a program's arrays, at least D."""
    return max(_SMALLEST, pl.next_power_of_2(self.shape[3]))

  def run(self, table: tuple, q: jax.Array, cache: LayerCache) -> jax.Array:
    """Launches the kernel, and joins the splits.

    Args:
      table: lists of heads, their lengths, first slots and their ends.
      q: [B, K, G, D] in the dtype of the products.
      cache: keys and values.

    Returns:
      [B, K, G, D] float32, undefined for heads that are in no list.
    """
    batch, kv_heads, group, dim = self.shape
    rows, splits = self.row_tiles * self.tile.rows, self.grid[2]
    slots = pl.cdiv(self.slots, self.tile.keys) * self.tile.keys

    def whole(*shape: int) -> pl.BlockSpec:
      return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    lead = batch, kv_heads, splits
    stored = whole(batch, kv_heads, slots, self.width)
    # JAX warns whenever it lowers a Triton kernel: a line on a user's terminal,
    # an error where warnings are errors.
    warnings.filterwarnings(
      "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )
    out, log_sums = pl.pallas_call(
      functools.partial(_kernel, launch=self),
      out_shape=(
        jax.ShapeDtypeStruct((*lead, group, dim), jnp.float32),
        jax.ShapeDtypeStruct((*lead, group), jnp.float32),
      ),
      grid=self.grid,
      in_specs=(
        tuple(whole(*x.shape) for x in table),
        whole(batch, kv_heads, rows, self.width),
        (stored, stored),
      ),
      out_specs=(whole(*lead, rows, self.width), whole(*lead, rows)),
      compiler_params=plgpu.CompilerParams(
        num_warps=_WARPS, num_stages=self.tile.stages
      ),
      interpret=self.interpret,
      name="moh_decode",
    )(table, q, (cache.k, cache.v))
    # A text in a list sees a slot, so the highest of its splits is above -inf.
    weights = jnp.exp2(log_sums - log_sums.max(2, keepdims=True))
    total = weights.sum(2)[..., None]
    return (out * weights[..., None]).sum(2) / total

  def place(self, *index: Any) -> tuple:
    """Index of rows [X, D], their columns filled up to the width."""
    return (*index, pl.ds(0, self.width))

  def inside(self, rows: jax.Array) -> jax.Array:
    """Marks the elements [X, width] of the rows that are meant, [X] bool."""
    if self.width == self.shape[3]:
      return rows[:, None]
    return rows[:, None] & (jnp.arange(self.width)[None] < self.shape[3])

  def load(self, ref: Any, index: tuple, rows: jax.Array) -> jax.Array:
    """Loads rows [X, width] in the dtype of the products; 0 where not meant."""
    x = ref.at[self.place(*index)]
    x = plgpu.load(x, mask=self.inside(rows), other=0.0)
    return x.astype(self.dtype)


def _kernel(
  table: tuple, q_ref: Any, stored: tuple, out_ref: Any, sum_ref: Any, *,
  launch: _Launch,
) -> None:  # fmt: skip
  heads, count, firsts, ends = table
  text, split = pl.program_id(0), pl.program_id(2)
  entry = lax.div(pl.program_id(1), launch.row_tiles)
  row_tile = lax.rem(pl.program_id(1), launch.row_tiles)
  tile, group, dim = launch.tile, *launch.shape[2:]

  @pl.when(entry < count[text])
  def _() -> None:
    head, first, end = heads[text, entry], firsts[text], ends[text]
    rows = pl.ds(row_tile * tile.rows, tile.rows)
    in_group = row_tile * tile.rows + jnp.arange(tile.rows) < group
    q = launch.load(q_ref, (text, head, rows), in_group)

    def step(j: jax.Array, carry: tuple) -> tuple:
      acc, highest, total = carry
      slot = j * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
      seen = (slot >= first) & (slot < end)
      place = text, head, pl.ds(j * tile.keys, tile.keys)
      k, v = (launch.load(x, place, seen) for x in stored)
      logits = across(q, k) * (dim**-0.5 * LOG2_E)
      logits = jnp.where(seen[None], logits, -jnp.inf)
      # Every tile has a slot that is seen, so this is above -inf.
      new = jnp.maximum(highest, logits.max(1))
      decay = jnp.exp2(highest - new)
      weights = jnp.exp2(logits - new[:, None])
      total = total * decay + weights.sum(1)
      acc = acc * decay[:, None] + times(weights.astype(v.dtype), v)
      return acc, new, total

    lowest = jnp.full(tile.rows, -jnp.inf, jnp.float32)
    zeros = jnp.zeros((tile.rows, launch.width), jnp.float32)
    # The tiles of this split: of slots that are seen, an equal part.
    begin, stop = (
      lax.div(first, tile.keys),
      lax.div(end + tile.keys - 1, tile.keys),
    )
    splits = launch.grid[2]
    each = lax.div(stop - begin + splits - 1, splits)
    begin = begin + split * each
    stop = jnp.minimum(begin + each, stop)
    acc, highest, total = lax.fori_loop(
      begin, stop, step, (zeros, lowest, jnp.zeros_like(lowest))
    )
    has_slots = total > 0
    total = jnp.where(has_slots, total, 1.0)
    place = text, head, split, rows
    plgpu.store(
      out_ref.at[launch.place(*place)],
      acc / total[:, None],
      mask=launch.inside(in_group),
    )
    log_sum = jnp.where(has_slots, highest + jnp.log2(total), -jnp.inf)
    plgpu.store(sum_ref.at[place], log_sum, mask=in_group)
