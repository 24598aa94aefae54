"""How the TPU kernels are launched: which rows meet which keys in each step.

Rows lie in the order of the table of active heads, so all rows that read one
key/value head lie together. A step of the grid is one visit: the rows of a
window (several blocks of the table) that read one unit (several key/value
heads) meet the part of the unit's keys that is in memory. Visits without work
do not exist: the grid's length is the number of visits, an array value.

Steps run one after another. What a step loads is fetched while the step before
it computes, and stays where the next step loads the same: the keys of a head
are fetched once for all of its rows if they fit the memory of a core, and rows
once for all heads and chunks of keys that they meet.

A step of one block of rows would be simpler to launch. By the tiles that are
visited and 0.35 microseconds a step it takes 1.25 to 1.95 times as long at
1,024 tokens, 1.03 to 1.14 times at 4,096 (v5e, half of 16 heads of 128).

Shapes as in `tpu`, and J tiles of keys, X visits at most, U units of key/value
heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moh_jax.ops.kernels.attention import Problem, keys_of_rows
from moh_jax.ops.lanes import LANES
from moh_jax.ops.target import target, vary_alike

_MIB = 1 << 20
# By `Target.kind`: VMEM of a core and the cores of a device, as
# `pltpu.get_tpu_info` says. Others, and the interpreter, get the least.
_CHIPS = {
  "TPU v4": (16 * _MIB, 2),
  "TPU v5 lite": (128 * _MIB, 1),
  "TPU v5e": (128 * _MIB, 1),
  "TPU v5": (64 * _MIB, 2),
  "TPU v5p": (64 * _MIB, 2),
  "TPU v6 lite": (128 * _MIB, 1),
  "TPU v6e": (128 * _MIB, 1),
  "TPU7x": (64 * _MIB, 1),
}
_LEAST = 16 * _MIB, 1
# What a step should do at least: starting one costs time whatever it does.
_STEP_FLOPS = 1e9
_STEP_ROWS = 512
_STEPS = 8  # of a call at least: only the first one's loads are waited for


@dataclasses.dataclass(frozen=True)
class Argument:
  """An input or output of a kernel: the whole array, and a program's part."""

  array: jax.Array | jax.ShapeDtypeStruct
  spec: pl.BlockSpec


@dataclasses.dataclass(frozen=True)
class Cut:
  """How rows and keys are cut into parts; all sizes are static.

  Attributes:
    keys: keys of a tile, L.
    tiles: tiles of all keys, J.
    chunk: tiles of a chunk, the keys that are in memory at once.
    window: blocks of rows of a window.
    heads: key/value heads of a unit, a divisor of K.
    cores: cores that share a call, 1 or 2; each gets a range of the visits. Two
      have at least two windows of rows, and two chunks of all units.
  """

  keys: int
  tiles: int
  chunk: int
  window: int
  heads: int
  cores: int = 1

  @property
  def chunks(self) -> int:
    """Chunks of all keys; 1 where the keys of a unit stay in memory."""
    return pl.cdiv(self.tiles, self.chunk)


class Tables(NamedTuple):
  """What the steps read beforehand; int32 arrays.

  Attributes:
    first: [cores + 1] the first visit of each core, and the number of visits.
    window: [X] window of the visit; X has room for a second core's idle one.
    unit: [X] unit of key/value heads.
    chunk: [X] chunk of keys.
    low: [X] first block of rows within the window.
    high: [X] end of these blocks.
    head: [T] key/value head of each block, b * K + k.
    start: [T] first tile of keys that one of the block's rows may see.
    whole: [T] end of the leading tiles, from `start`, that need no mask.
    end: [T] end of the tiles that one of the block's rows may see.
  """

  first: jax.Array
  window: jax.Array
  unit: jax.Array
  chunk: jax.Array
  low: jax.Array
  high: jax.Array
  head: jax.Array
  start: jax.Array
  whole: jax.Array
  end: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
  """Launch of one kernel of one call, and what its steps do.

  Attributes:
    problem: the call.
    max_keys: largest L allowed: M, at most LANES, or a multiple of LANES.
    keys_first: whether the kernel adds to keys, visiting all of their rows one
      after another, instead of to rows.
  """

  problem: Problem
  max_keys: int
  keys_first: bool

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a tile, L: tiles of nearly equal size, so few keys are padding.

    For instance, 1,100 keys in tiles of at most 1,024 are two tiles of 640.
    """
    tiles = max(pl.cdiv(self.problem.keys, self.max_keys), self._parts)
    if tiles == 1 and self.problem.keys == self.max_keys:
      return self.max_keys  # a single tile may have any size
    unit = min(LANES, self.max_keys)
    return pl.cdiv(pl.cdiv(self.problem.keys, unit), tiles) * unit

  @property
  def _parts(self) -> int:
    """Into how many parts the keys of a head are cut for all cores to add."""
    cores = _CHIPS.get(target().kind, _LEAST)[1]
    heads = self.problem.batch * self.problem.kv_heads
    return pl.cdiv(cores, heads) if self.keys_first else 1

  @functools.cached_property
  def cut(self) -> Cut:
    """The sizes of what a step loads, such that it fits the VMEM."""
    memory, cores = _CHIPS.get(target().kind, _LEAST)
    problem = self.problem
    rows, tiles = problem.rows, pl.cdiv(problem.keys, self.keys)
    flops = _STEP_FLOPS * (2 if problem.visible.causal else 1)
    most = min(
      problem.num_blocks // _STEPS,
      memory // 4 // (rows * self._bytes_per_row),
      pl.cdiv(int(flops / (4 * problem.keys * problem.head_dim)), rows),
    )
    window = max(most, pl.cdiv(_STEP_ROWS, rows), 1)
    window = min(window, pl.cdiv(problem.num_blocks, cores))
    # A single block of rows gains nothing from keys that stay.
    once = problem.queries * problem.group <= rows
    chunk = memory // 2 // (self.keys * self._bytes_per_key)
    if self._parts > 1:  # more of them, since causal ones differ in work
      chunk = min(chunk, tiles // (2 * self._parts))
    chunk = 1 if once else max(min(tiles, chunk), 1)
    chunk = pl.cdiv(tiles, pl.cdiv(tiles, chunk))
    heads, all_heads = 1, problem.batch * problem.kv_heads
    if chunk == tiles and not once:
      blocks = pl.cdiv(problem.num_blocks, all_heads)
      fit = memory // 2 // (tiles * self.keys * self._bytes_per_key)
      heads = max(min(window // blocks, fit, all_heads // cores), 1)
      heads = max(x for x in range(1, heads + 1) if problem.kv_heads % x == 0)
    places = pl.cdiv(problem.num_blocks, window)
    if self.keys_first:
      places = all_heads // heads * pl.cdiv(tiles, chunk)
    return Cut(self.keys, tiles, chunk, window, heads, min(cores, places))

  @property
  def _bytes_per_row(self) -> int:
    """VMEM for one row: up to four arrays, each loaded a step ahead."""
    return 8 * _padded(self.problem.head_dim) * self.problem.dtype.itemsize

  @property
  def _bytes_per_key(self) -> int:
    """VMEM for one key and its value, loaded ahead, and what is added to it."""
    numbers = 2 * _padded(self.problem.head_dim)
    size = 2 * self.problem.dtype.itemsize
    if not self.keys_first:
      return numbers * size
    # Gradients as results and as float32 sums; masks as columns.
    return numbers * (2 * size + 4) + 8 * LANES * self.problem.masks_by_value

  def _vmem_limit(self) -> int:
    """VMEM that the compiler may use; XLA keeps other arrays in the rest."""
    memory, _ = _CHIPS.get(target().kind, _LEAST)
    rows, cut = self.problem.rows, self.cut
    keys = cut.heads * cut.chunk * self.keys
    loaded = keys * self._bytes_per_key
    loaded += cut.window * rows * self._bytes_per_row
    # Logits, weights, and what else is of the size of a tile, and scratch.
    tile = rows * (self.keys + 4 * _padded(self.problem.head_dim))
    return min(memory // 8 * 7, loaded + 24 * tile + 8 * _MIB)

  # What is passed to a kernel.

  def rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step its window of rows.

    Args:
      x: [T * R, D], loaded as [blocks, R, D], or [T * R], loaded as
        [blocks, 1, R].
    """
    inner = (1, self.problem.rows, *x.shape[1:])[-2:]
    shape = (self.problem.num_blocks, *inner)
    output = isinstance(x, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if output else x.reshape(shape)

    index = _index(lambda lists, visit: (lists.window[visit], 0, 0))
    return Argument(x, pl.BlockSpec((self.cut.window, *inner), index))

  def keys_or_values(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step the keys or values of a unit that are in memory.

    XLA writes keys in this order as it computes them where D fills the vector
    lanes; [B, M, K * D], which needs no other order, would be copied.

    Args:
      x: [B, M, K, D], loaded as [heads, keys, D].
    """
    batch, keys, kv_heads, dim = x.shape
    padded = self.cut.tiles * self.keys
    if isinstance(x, jax.ShapeDtypeStruct):
      x = jax.ShapeDtypeStruct((batch * kv_heads, padded, dim), x.dtype)
    else:
      x = x.swapaxes(1, 2).reshape(batch * kv_heads, keys, dim)
      if padded > keys:
        x = jnp.pad(x, ((0, 0), (0, padded - keys), (0, 0)))

    index = _index(lambda lists, i: (lists.unit[i], lists.chunk[i], 0))
    block = self.cut.heads, self.cut.chunk * self.keys, dim
    return Argument(x, pl.BlockSpec(block, index))

  def key_masks(self) -> tuple:
    """The key mask and each key's segment, [1, 1, keys] int32 or None."""
    cut = self.cut
    fill = cut.tiles * cut.keys - self.problem.keys
    each = self.problem.kv_heads // cut.heads
    index = _index(
      lambda lists, i: (lax.div(lists.unit[i], each), 0, lists.chunk[i])
    )
    spec = pl.BlockSpec((1, 1, cut.chunk * cut.keys), index)

    def argument(x: jax.Array) -> Argument:
      x = jnp.pad(x.astype(jnp.int32), ((0, 0), (0, fill)))
      return Argument(x[:, None], spec)

    visible = self.problem.visible
    return jax.tree.map(argument, (visible.key_mask, visible.segments))

  def call(
    self, kernel: Callable, rows: Any, keys: tuple
  ) -> tuple[Any, jax.Array]:
    """Launches a kernel.

    Args:
      kernel: gets the running step, the rows, keys and values, outputs and
        float32 arrays that live through all steps, for what is added up. The
        step has one int32 array more for each mask of the side that is added to
        (rows, or keys if `keys_first`), in which it stores the mask as columns,
        [tiles, L or R, LANES].
      rows: arrays [T * R, D] or [T * R].
      keys: keys and values.

    Returns:
      The outputs as `rows` or `keys_or_values` shape them, and which chunks of
      keys were visited, [U, chunks] bool.
    """
    problem, cut = self.problem, self.cut
    lists, visited = tables(problem, cut, keys_first=self.keys_first)
    row_masks = jax.tree.map(self.rows, problem.row_masks())
    key_masks = self.key_masks()
    if self.keys_first:
      shape = jax.ShapeDtypeStruct(problem.k_shape, problem.dtype)
      outputs = (self.keys_or_values(shape),) * 2
      columns, shape = key_masks, (cut.chunk, self.keys, LANES)
      sums = [(cut.heads, cut.chunk * self.keys, problem.head_dim)] * 2
    else:
      outputs = tuple(map(self.rows, problem.row_outputs))
      columns, shape = row_masks, (1, problem.rows, LANES)
      # Sums of a block outlive its step only where its keys come in chunks.
      size = cut.window if cut.chunks > 1 else 1, problem.rows
      sums = [(*size, width) for width in (problem.head_dim, LANES, LANES)]
    columns = jax.tree.map(lambda x: pltpu.VMEM(shape, jnp.int32), columns)
    rows = jax.tree.map(self.rows, rows)
    keys = tuple(map(self.keys_or_values, keys))
    inputs = rows, keys, (row_masks, key_masks)
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    sums = [pltpu.VMEM(shape, jnp.float32) for shape in sums]

    def run(*refs: Any) -> None:
      lists = Tables(*refs[: len(Tables._fields)])
      rows, keys, masks, *refs, columns = refs[len(lists) :]
      step = Step(self, lists, masks, columns)
      kernel(step, rows, keys, refs[:2], refs[2:])

    outputs, inputs = jax.tree.map(lambda x: x.array, (outputs, inputs))
    given = vary_alike((*lists, *inputs))
    launch = pl.pallas_call(
      run,
      out_shape=vary_alike(outputs, given),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(lists),
        grid=(cut.cores, jnp.diff(lists.first).max()),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[*sums, columns],
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=self._vmem_limit(),
      ),
      interpret=problem.interpret,
      name="moh" + kernel.__name__,
    )
    results = launch(*given)
    return results, visited


class Step:
  """The running step of a grid.

  Attributes:
    plan: of the launch.
    lists: the tables.
    opens: whether it is the first step that adds to its rows, or keys.
    closes: whether it is the last one.
  """

  def __init__(self, plan: Plan, lists: Tables, masks: tuple, columns: tuple):
    """Finds the step in the tables.

    Args:
      plan: of the launch.
      lists: references to the tables.
      masks: references to the masks of rows and those of keys.
      columns: references to those of the side that is added to, as columns.
    """
    self.plan, self.lists = plan, lists
    (self._row_masks, self._key_masks), self._columns = masks, columns
    core, step = pl.program_id(0), pl.program_id(1)
    begin, end = lists.first[core], lists.first[core + 1]
    visit = visit_of_step(core, step, lists)
    # Cores whose visits are fewer repeat their last one without work.
    works = begin + step < end
    added_to = lists.chunk if plan.keys_first else lists.window

    def same(other: jax.Array) -> jax.Array:
      equal = added_to[other] == added_to[visit]
      return equal & (lists.unit[other] == lists.unit[visit])

    opens = (visit == begin) | ~same(jnp.maximum(visit - 1, 0))
    closes = (visit == end - 1) | ~same(jnp.minimum(visit + 1, end - 1))
    self._visit, self._low = visit, lists.low[visit]
    self._high = jnp.where(works, lists.high[visit], self._low)
    self.opens, self.closes = works & opens, works & closes

  @property
  def _first_tile(self) -> jax.Array:
    """The first tile of keys in memory."""
    return self.lists.chunk[self._visit] * self.plan.cut.chunk

  def when(self, condition: jax.Array) -> Callable[[Callable], None]:
    """Like `pl.when`; always where all keys of a block meet it in one step."""
    if self.plan.cut.chunks > 1:
      return pl.when(condition)
    return lambda work: work()

  def each_block(self, work: Callable[[Any, Any, Any], None]) -> None:
    """Runs work(i, block, head) for every block of rows.

    i is its place in the window, `block` in the table, `head` its key/value
    head within the unit.
    """
    cut = self.plan.cut
    first_block = self.lists.window[self._visit] * cut.window
    first_head = self.lists.unit[self._visit] * cut.heads

    def one(i: jax.Array) -> None:
      block = first_block + i
      head = self.lists.head[block] - first_head if cut.heads > 1 else 0
      work(i, block, head)

    _loop(self._low, self._high, one)

  def each_tile(self, block: Any, work: Callable[[Any, bool], None]) -> None:
    """Runs work(j, masked) for the tiles in memory that a block's rows see.

    j is the tile's place in the chunk.
    """
    problem, chunk = self.plan.problem, self.plan.cut.chunk
    start, whole, end = (
      jnp.clip(x[block] - self._first_tile, 0, chunk) for x in self.lists[-3:]
    )
    if not problem.masks_by_value:
      _loop(start, whole, lambda j: work(j, False))
    # Without a causal mask only a last tile with padding needs one.
    padded = problem.keys % self.plan.keys
    if problem.masks_by_value or problem.visible.causal or padded:
      _loop(whole, end, lambda j: work(j, True))

  def each_tile_in_memory(self, work: Callable[[Any, Any], None]) -> None:
    """Runs work(head, j) for every tile of a unit's keys that is in memory."""
    chunk, heads = self.plan.cut.chunk, self.plan.cut.heads

    def one(i: jax.Array) -> None:
      head = lax.div(i, chunk) if heads > 1 else 0
      work(head, lax.rem(i, chunk))

    _loop(0, heads * chunk, one)

  def tile(self, j: Any) -> Any:
    """The keys of tile j among those in memory."""
    keys = self.plan.keys
    if self.plan.cut.chunk == 1:
      return slice(None)
    return pl.ds(pl.multiple_of(j * keys, keys), keys)

  def write_columns(self, place: Any, i: Any, part: Any = slice(None)) -> None:
    """Stores part of the i-th row of each mask, [1, X], as a column."""
    side = self._key_masks if self.plan.keys_first else self._row_masks

    def write(mask: Any, column: Any) -> None:
      column[place] = as_columns(mask[i, :, part])

    jax.tree.map(write, side, self._columns)

  def hide(self, logits: jax.Array, i: Any, j: Any) -> jax.Array:
    """Sets logits to -inf where a row of block i does not see a key of tile j.

    Args:
      logits: [R, L], or [L, R] if the kernel adds to keys.
      i: the block's place in the window.
      j: the tile's place in the chunk.
    """
    plan, axis = self.plan, 0 if self.plan.keys_first else 1  # of the keys

    def columns(i: Any, width: int) -> tuple:
      return jax.tree.map(lambda x: repeat_lanes(x[i], width), self._columns)

    if plan.keys_first:
      rows = jax.tree.map(lambda x: x[i], self._row_masks)
      keys = columns(j, plan.problem.rows)
    else:
      rows = columns(0, plan.keys)
      keys = jax.tree.map(lambda x: x[0, :, self.tile(j)], self._key_masks)
    (last, row_segments), (key_mask, segments) = rows, keys
    shape = [1, 1]
    shape[axis] = plan.keys
    position = lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
    position = position + (self._first_tile + j) * plan.keys
    seen = position < plan.problem.keys
    if last is not None:
      seen = seen & (position <= last)
    if key_mask is not None:
      seen = seen & (key_mask != 0)
    if segments is not None:
      seen = seen & (segments == row_segments)
    return jnp.where(seen, logits, -jnp.inf)


def as_columns(row: jax.Array) -> jax.Array:
  """Transposes a row [1, X] to [X, LANES], the same in every lane."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def repeat_lanes(columns: jax.Array, width: int) -> jax.Array:
  """Repeats [X, LANES], the same in every lane, to [X, width].

  Unlike broadcasting [X, 1] it moves nothing between lanes.
  """
  copies = pl.cdiv(width, LANES)
  if copies > 1:
    columns = jnp.concatenate([columns] * copies, axis=1)
  return columns[:, :width]


def _loop(start: Any, end: Any, work: Callable[[Any], None]) -> None:
  lax.fori_loop(start, end, lambda i, _: work(i), None)


def tables(
  problem: Problem, cut: Cut, *, keys_first: bool
) -> tuple[Tables, jax.Array]:
  """Lists the visits of a call.

  Args:
    problem: the call.
    cut: how rows and keys are cut.
    keys_first: whether visits of the same keys follow one another, instead of
      visits of the same rows.

  Returns:
    The tables, and which chunks of a unit's keys are visited, [U, chunks] bool.
  """
  start, _, whole, end = keys_of_rows(problem, problem.rows, cut.keys)
  bounds = start, start if problem.masks_by_value else whole, end
  first = problem.blocks.first[:: problem.together * cut.heads]
  visits, count = _visits_of_rows(first, problem.num_blocks, cut.window)
  visited = (first[1:] > first[:-1])[:, None]
  chunk = jnp.zeros_like(visits[0])
  if cut.chunks > 1:
    flags = _chunks_seen(visits, bounds, cut)
    flags = flags & (jnp.arange(len(flags)) < count)[:, None]
    if keys_first:
      visited = jnp.zeros((len(first) - 1, cut.chunks), bool)
      visited = visited.at[visits[1]].max(flags)
      chunk, index = jnp.nonzero(flags.T, size=flags.size)
    else:
      # Rows that see no key are visited too: their output is 0.
      unseen = ~flags.any(-1) & (jnp.arange(len(flags)) < count)
      flags = flags.at[:, 0].max(unseen)
      index, chunk = jnp.nonzero(flags, size=flags.size)
    count = flags.sum(dtype=jnp.int32)
    visits = [x[index] for x in visits]
    chunk = chunk.astype(jnp.int32)
  window, unit, low, high = visits
  count = jnp.maximum(count, 1)
  starts = jnp.stack([jnp.zeros_like(count), count])
  if cut.cores > 1:
    # Cores share neither rows nor keys to which they add.
    place, places = window, pl.cdiv(problem.num_blocks, cut.window)
    if keys_first:
      place, places = unit * cut.chunks + chunk, visited.size
    work = _work(visits, chunk, bounds, cut)
    place, starts = _halves(place, work, count, places)
    window, unit, chunk, low, high = (
      jnp.pad(x, (0, 1)) for x in (window, unit, chunk, low, high)
    )
    high = high.at[count].set(low[count])  # of the idle visit
    if keys_first:
      unit, chunk = jnp.divmod(place, cut.chunks)
    else:
      window = place
  head = problem.blocks.head // problem.together
  lists = Tables(starts, window, unit, chunk, low, high, head, *bounds)
  return lists, visited


def _visits_of_rows(
  first: jax.Array, blocks: int, window: int
) -> tuple[list[jax.Array], jax.Array]:
  """Lists the pairs of a window and a unit that share blocks.

  Args:
    first: [U + 1] first block of each unit, and the number of used blocks.
    blocks: T.
    window: blocks of a window.

  Returns:
    The visits' `window`, `unit`, `low` and `high`, [X] each, and the number of
    visits.
  """
  begin, end = first[:-1], first[1:]
  opening = begin // window
  count = jnp.where(end > begin, (end - 1) // window - opening + 1, 0)
  ended = jnp.cumsum(count, dtype=jnp.int32)
  most = min(blocks, pl.cdiv(blocks, window) + len(begin))
  index = jnp.arange(most, dtype=jnp.int32)
  index = jnp.minimum(index, jnp.maximum(ended[-1], 1) - 1)
  # A visit's unit is the number of units whose visits end at or before it.
  unit = (ended[None] <= index[:, None]).sum(-1, dtype=jnp.int32)
  unit = jnp.minimum(unit, len(begin) - 1)
  place = opening[unit] + index - (ended - count)[unit]
  low = jnp.maximum(begin[unit] - place * window, 0)
  high = jnp.minimum(end[unit] - place * window, window)
  return [place, unit, low, high], ended[-1]


def _tiles_seen(
  visits: list, bounds: tuple, cut: Cut
) -> tuple[jax.Array, jax.Array]:
  """First tile of keys and their end for each block of a visit, [X, window].

  Blocks that are not the visit's, or see no key, begin at the last tile's end
  and end at 0.
  """
  window, _, low, high = visits
  place = jnp.arange(cut.window)[None]
  here = (place >= low[:, None]) & (place < high[:, None])
  block = window[:, None] * cut.window + place
  block = jnp.minimum(block, len(bounds[0]) - 1)
  start, _, end = (x[block] for x in bounds)
  here = here & (end > start)
  return jnp.where(here, start, cut.tiles), jnp.where(here, end, 0)


def _chunks_seen(visits: list, bounds: tuple, cut: Cut) -> jax.Array:
  """Which chunks the rows of each visit see, [X, chunks] bool."""
  start, end = _tiles_seen(visits, bounds, cut)
  start = start.min(-1, keepdims=True)
  end = end.max(-1, keepdims=True)
  chunk = jnp.arange(cut.chunks)[None]
  return (start < (chunk + 1) * cut.chunk) & (end > chunk * cut.chunk)


def _work(visits: list, chunk: jax.Array, bounds: tuple, cut: Cut) -> jax.Array:
  """Pairs of a block and a tile in each visit, [X] int32."""
  start, end = _tiles_seen(visits, bounds, cut)
  first = chunk[:, None] * cut.chunk
  tiles = jnp.minimum(end, first + cut.chunk) - jnp.maximum(start, first)
  return jnp.maximum(tiles, 0).sum(-1, dtype=jnp.int32)


def _halves(
  place: jax.Array, work: jax.Array, count: jax.Array, places: int
) -> tuple[jax.Array, jax.Array]:
  """Splits the visits into two ranges of nearly equal work, none of them empty.

  A core without a visit would write what is in its memory over what the other
  one wrote. So where all visits add to one place, an idle visit of another one
  comes last.

  Args:
    place: [X] what each visit adds to; visits of one place stay together.
    work: [X] int32 work of each visit.
    count: number of visits.
    places: number of places, at least 2.

  Returns:
    The places of all visits, [X + 1]; and where the ranges begin and end, [3];
    int32.
  """
  index = jnp.arange(len(place) + 1, dtype=jnp.int32)
  added_to = jnp.zeros(places, bool).at[place].max(index[:-1] < count)
  free = jnp.argmin(added_to).astype(jnp.int32)
  place = jnp.pad(place, (0, 1)).at[count].set(free)
  end = count + (added_to.sum() == 1).astype(jnp.int32)
  new = (place != jnp.roll(place, 1)) & (index > 0) & (index < end)
  done = jnp.cumsum(jnp.where(index[:-1] < count, work, 0), dtype=jnp.int32)
  done = jnp.pad(done, (1, 0))
  far = jnp.where(new, jnp.abs(2 * done - done[-1]), 2 * done[-1] + 1)
  half = jnp.argmin(far).astype(jnp.int32)
  return place, jnp.stack([jnp.zeros_like(count), half, end])


def _index(place: Callable) -> Callable:
  """An index map of a step, from (lists, visit) -> place."""

  def index(core: Any, step: Any, *lists: Any) -> tuple:
    lists = Tables(*lists)
    return place(lists, visit_of_step(core, step, lists))

  return index


def visit_of_step(core: Any, step: Any, lists: Tables) -> jax.Array:
  """The visit of a step; the last one of its core where there are no more."""
  return jnp.minimum(lists.first[core] + step, lists.first[core + 1] - 1)


def _padded(dim: int) -> int:
  """Lanes that a row of an array takes in VMEM."""
  return pl.cdiv(dim, LANES) * LANES
