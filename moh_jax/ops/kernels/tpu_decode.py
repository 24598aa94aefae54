"""The decoding kernel for TPUs (Pallas Mosaic).

A step of the grid reads one tile of slots of one key/value head. Steps run one
after another, and the tiles of the next step are fetched while one computes;
a step without work names the tiles of the step before, so nothing is fetched.
The softmax is in base 2, which the hardware computes directly.

Shapes: B texts, K key/value heads, G query heads of a key/value head, M slots,
D head dim, L entries of a list of heads, T slots of a tile, R rows: G filled up
to whole registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moh_jax.ops.head_layout import LANES
from moh_jax.ops.kernels.problem import (
  DecodeProblem,
  Tile,
  across,
  fitting,
  times,
)
from moh_jax.ops.kernels.tpu_plan import repeat_lanes

# Only the slots of a tile matter.
TILES = {2: {256: Tile(16, 1024)}, 4: {256: Tile(16, 512)}}
_ROWS = 16  # rows of a register of bfloat16


def attend(problem: DecodeProblem, q: jax.Array) -> jax.Array:
  """Computes the attention of the heads in the lists.

  Args:
    problem: the call.
    q: [B, K, G, D] queries in the dtype of the products.

  Returns:
    [B, K, G, D] float32, undefined for heads that are in no list.
  """
  batch, _, group, dim = q.shape
  rows = pl.cdiv(group, _ROWS) * _ROWS
  q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
  out = Plan(problem, rows).call(q.reshape(-1, rows, dim))
  out = out[:, :group].reshape(batch, problem.entries, group, dim)
  return jax.vmap(lambda x, entry: x[entry])(out, problem.heads.entry)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The launch of the kernel.

  Attributes:
    problem: the call.
    rows: R.
  """

  problem: DecodeProblem
  rows: int

  @functools.cached_property
  def keys(self) -> int:
    """T: M if that is small, else a multiple of LANES."""
    problem = self.problem
    tile = fitting(TILES, problem.head_dim, problem.dtype)
    return min(tile.keys, problem.keys)

  @property
  def grid(self) -> tuple[int, int, int]:
    """Steps: texts, entries of a list, tiles of slots."""
    tiles = pl.cdiv(self.problem.keys, self.keys)
    return self.problem.batch, self.problem.entries, tiles

  @property
  def head_dim_first(self) -> bool:
    """Whether keys and values are loaded as [D, T] instead of [T, D].

    XLA stores a cache so if D does not fill the vector lanes; any other order
    would copy the whole cache.
    """
    return self.problem.head_dim % LANES > 0

  def tables(self) -> tuple[jax.Array, ...]:
    """Tells the steps what to read, five int32 arrays.

    Returns:
      count: [B] entries of each text's list that are read.
      head: [B * L] the lists.
      first: [B] first slot that each text's token sees.
      end: [B] the slot after the last one that it sees.
      source: [B] the text itself if its list is not empty, else the one before
        it whose list is not, or at the start of the batch the one after it.
    """
    problem = self.problem
    text = jnp.arange(problem.batch, dtype=jnp.int32)
    has_heads = problem.heads.count > 0
    source = lax.cummax(jnp.where(has_heads, text, 0))
    source = jnp.maximum(source, jnp.argmax(has_heads).astype(jnp.int32))
    heads = problem.heads.head.reshape(-1)
    return problem.heads.count, heads, problem.first, problem.end, source

  def place(self, b: Any, x: Any, j: Any, tables: tuple) -> tuple[Any, Any]:
    """What step (b, x, j) loads: a head, b * K + k, and a tile of its slots.

    A step without work names what the step before it named; before the first
    step with work, what that one will.
    """
    count, heads, first, end, source = tables
    text = source[b]
    entry = jnp.where(text < b, self.problem.entries, jnp.where(text > b, 0, x))
    last = jnp.maximum(count[text] - 1, 0)
    entry = jnp.minimum(entry, last)
    head = (
      text * self.problem.kv_heads + heads[text * self.problem.entries + entry]
    )
    begin = lax.div(first[text], self.keys)
    last = lax.div(jnp.maximum(end[text], 1) - 1, self.keys)
    tile = jnp.where(x < count[b], jnp.minimum(begin + j, last), last)
    return head, jnp.where(text > b, begin, tile)

  def call(self, q: jax.Array) -> jax.Array:
    """Launches the kernel.

    Args:
      q: [B * K, R, D].

    Returns:
      [B * L, R, D] float32 of the lists' entries, undefined for those that are
      not read.
    """
    problem = self.problem
    count, rows, dim = q.shape
    cache = problem.cache
    stored = [x.reshape(count, -1, dim) for x in (cache.k, cache.v)]
    block = 1, self.keys, dim
    if self.head_dim_first:
      stored, block = [x.swapaxes(1, 2) for x in stored], (1, dim, self.keys)
    scales = jax.tree.map(
      lambda x: x.reshape(count, 1, -1), (cache.k_scale, cache.v_scale)
    )

    if not problem.interpret:
      # XLA would fetch the whole cache of small models into VMEM.
      in_hbm = functools.partial(
        pltpu.with_memory_space_constraint, memory_space=pltpu.HBM
      )
      stored, scales = jax.tree.map(in_hbm, (stored, scales))

    def own(b, x, j, *tables):
      return self.place(b, x, j, tables)[0], 0, 0

    def by_slots(b, x, j, *tables):
      head, tile = self.place(b, x, j, tables)
      return head, 0, tile

    def tile_of_cache(b, x, j, *tables):
      head, _, tile = by_slots(b, x, j, *tables)
      return (head, 0, tile) if self.head_dim_first else (head, tile, 0)

    # Every entry has rows of its own, also those that are not read: two cores
    # may share the grid, in any order of the entries.
    def target(b, x, j, *tables):
      return b * problem.entries + x, 0, 0

    in_specs = (
      pl.BlockSpec((1, rows, dim), own),
      (pl.BlockSpec(block, tile_of_cache),) * 2,
      jax.tree.map(lambda _: pl.BlockSpec((1, 1, self.keys), by_slots), scales),
    )
    shape = problem.batch * problem.entries, rows, dim
    sums = [pltpu.VMEM((rows, n), jnp.float32) for n in (dim, LANES, LANES)]
    return pl.pallas_call(
      functools.partial(_kernel, plan=self),
      out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=self.grid,
        in_specs=in_specs,
        out_specs=pl.BlockSpec((1, rows, dim), target),
        scratch_shapes=sums,
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
      ),
      interpret=problem.interpret,
      name="moh_decode",
    )(*self.tables(), q, tuple(stored), scales)


def _kernel(
  count: Any, heads: Any, firsts: Any, ends: Any, source: Any, q_ref: Any,
  stored: tuple, scales: tuple, out_ref: Any, acc_ref: Any, highest_ref: Any,
  total_ref: Any, *, plan: Plan,
) -> None:  # fmt: skip
  text, j = pl.program_id(0), pl.program_id(2)
  first, end = firsts[text], ends[text]
  is_read = pl.program_id(1) < count[text]
  start = (lax.div(first, plan.keys) + j) * plan.keys
  axis = 1 if plan.head_dim_first else 0  # of the slots
  with_keys, with_values = across, times
  if plan.head_dim_first:
    with_keys, with_values = times, across

  @pl.when(j == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)
    highest_ref[...] = jnp.full_like(highest_ref, -jnp.inf)
    total_ref[...] = jnp.zeros_like(total_ref)

  def seen(shape: tuple[int, ...], axis: int) -> jax.Array:
    slot = start + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (slot >= first) & (slot < end)

  def scaled(x: jax.Array, scale_ref: Any, masked: bool) -> jax.Array:
    if scale_ref is None:
      return x
    scale = scale_ref[0]
    # What is not seen may be anything: a weight of 0 would not hide NaN.
    if masked:
      scale = jnp.where(seen(scale.shape, 1), scale, 0.0)
    return x * scale

  def work(masked: bool) -> None:
    k, v = (x[0] for x in stored)
    k = k.astype(jnp.promote_types(k.dtype, plan.problem.dtype))
    logits = with_keys(q_ref[0], k) * plan.problem.log2_scale
    logits = scaled(logits, scales[0], masked)
    if masked:
      logits = jnp.where(seen(logits.shape, 1), logits, -jnp.inf)
    highest = highest_ref[...]
    # Every tile has a slot that is seen, so this is above -inf.
    new = jnp.maximum(highest, logits.max(1, keepdims=True))
    decay = jnp.exp2(highest - new)
    weights = jnp.exp2(logits - repeat_lanes(new, plan.keys))
    total_ref[...] = total_ref[...] * decay + weights.sum(1, keepdims=True)
    highest_ref[...] = new
    if masked and scales[1] is None:
      v = jnp.where(seen(v.shape, axis), v.astype(jnp.float32), 0.0).astype(
        v.dtype
      )
    v = v.astype(jnp.promote_types(v.dtype, plan.problem.dtype))
    weights = scaled(weights, scales[1], masked).astype(v.dtype)
    out = with_values(weights, v)
    acc_ref[...] = acc_ref[...] * repeat_lanes(decay, out.shape[1]) + out

  runs = is_read & (start < end)
  whole = (start >= first) & (start + plan.keys <= end)
  pl.when(runs & whole)(functools.partial(work, False))
  pl.when(runs & ~whole)(functools.partial(work, True))

  @pl.when(is_read & (j == plan.grid[2] - 1))
  def _() -> None:
    out_ref[0] = acc_ref[...] / repeat_lanes(total_ref[...], acc_ref.shape[1])
