"""Which rows meet which keys in each step of the TPU kernels.

Rows lie in the order of the table of active heads, so all rows that read one
key/value head lie together. A step of the grid is one visit: the rows of a
window (several blocks of the table) that read one unit (several key/value
heads) meet the part of the unit's keys that is in memory. Visits without work
do not exist: the grid's length is the number of visits, an array value.

Shapes: B batch, N queries, M keys, K key/value heads, T blocks of rows, R rows
of a block, J tiles of keys, X visits at most, U units of key/value heads.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import Problem


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
  bounds = tile_bounds(problem, cut.keys, cut.tiles)
  first = problem.blocks.first[:: problem.group * cut.heads]
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
    place, starts = _halves(place, count, places)
    window, unit, chunk, low, high = (
      jnp.pad(x, (0, 1)) for x in (window, unit, chunk, low, high)
    )
    high = high.at[count].set(low[count])  # of the idle visit
    if keys_first:
      unit, chunk = jnp.divmod(place, cut.chunks)
    else:
      window = place
  head = problem.blocks.head // problem.group
  lists = Tables(starts, window, unit, chunk, low, high, head, *bounds)
  return lists, visited


def tile_bounds(
  problem: Problem, keys: int, tiles: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the tiles of keys that each block of rows reads.

  Args:
    problem: the call.
    keys: keys of a tile, L.
    tiles: J.

  Returns:
    `start`, `whole` and `end` of `Tables`. A block that sees no key has
    start = end.
  """
  whole, end = problem.key_bounds(problem.rows)
  whole, end = whole // keys, pl.cdiv(end, keys)
  start = jnp.zeros_like(end)
  if problem.masks_by_value:
    seen = _tiles_seen(problem, keys, tiles)
    seen = seen & (jnp.arange(tiles)[None] < end[:, None])
    first = jnp.argmax(seen, -1).astype(jnp.int32)
    last = tiles - jnp.argmax(seen[:, ::-1], -1).astype(jnp.int32)
    some = seen.any(-1)
    start, end = jnp.where(some, first, 0), jnp.where(some, last, 0)
    whole = start
  return start, jnp.clip(whole, start, end), end


def _tiles_seen(problem: Problem, keys: int, tiles: int) -> jax.Array:
  """Which tiles may hold a key that a block sees by its value, [T, J] bool.

  A block sees a tile only if the ranges of their segments overlap; hidden keys
  are in no range.
  """
  segments, hidden = problem.visible.segments, problem.visible.key_mask
  rows = problem.row_masks()[1]
  if segments is None:
    segments = jnp.zeros((problem.batch, problem.keys), jnp.int32)
    rows = jnp.zeros(problem.blocks.token.size, jnp.int32)
  hidden = jnp.zeros_like(segments, bool) if hidden is None else ~hidden
  fill = ((0, 0), (0, tiles * keys - problem.keys))
  segments = jnp.pad(segments, fill).reshape(-1, tiles, keys)
  hidden = jnp.pad(hidden, fill, constant_values=True).reshape(segments.shape)
  text = problem.blocks.head // (problem.group * problem.kv_heads)
  lowest, highest = (x[text] for x in _ranges(segments, hidden))
  empty = problem.blocks.token == problem.queries
  least, most = _ranges(rows.reshape(empty.shape), empty)
  return (lowest <= most[:, None]) & (highest >= least[:, None])


def _ranges(x: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The least and the largest visible number of the last axis."""
  limits = jnp.iinfo(x.dtype)
  least = jnp.where(hidden, limits.max, x).min(-1)
  return least, jnp.where(hidden, limits.min, x).max(-1)


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


def _chunks_seen(visits: list, bounds: tuple, cut: Cut) -> jax.Array:
  """Which chunks the rows of each visit see, [X, chunks] bool."""
  window, _, low, high = visits
  place = jnp.arange(cut.window)[None]
  here = (place >= low[:, None]) & (place < high[:, None])
  block = window[:, None] * cut.window + place
  block = jnp.minimum(block, len(bounds[0]) - 1)
  start, _, end = (x[block] for x in bounds)
  here = here & (end > start)
  start = jnp.where(here, start, cut.tiles).min(-1, keepdims=True)
  end = jnp.where(here, end, 0).max(-1, keepdims=True)
  chunk = jnp.arange(cut.chunks)[None]
  return (start < (chunk + 1) * cut.chunk) & (end > chunk * cut.chunk)


def _halves(
  place: jax.Array, count: jax.Array, places: int
) -> tuple[jax.Array, jax.Array]:
  """Splits the visits into two nearly equal ranges, neither of them empty.

  A core without a visit would write what is in its memory over what the other
  one wrote. So where all visits add to one place, an idle visit of another one
  comes last.

  Args:
    place: [X] what each visit adds to; visits of one place stay together.
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
  far = jnp.where(new, jnp.abs(2 * index - count), 2 * len(index))
  half = jnp.argmin(far).astype(jnp.int32)
  return place, jnp.stack([jnp.zeros_like(count), half, end])


def visit_of_step(core: Any, step: Any, lists: Tables) -> jax.Array:
  """The visit of a step; the last one of its core where there are no more."""
  return jnp.minimum(lists.first[core] + step, lists.first[core + 1] - 1)
