"""The kernels for TPUs (Pallas Mosaic).

A step of the grid works on a window of rows of one key/value head (or of a few,
where sequences are short), with the head's keys in memory. It loops over the
window's blocks of rows, and for each over the tiles of keys that the block
sees. The first two kernels (forward, gradient of the queries) add to the rows
of a block; the third (gradients of keys and values) adds to the keys, which all
of a head's rows visit one after another. The softmax is in base 2, which the
hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, m heads side by side in the lanes, W = m * D lanes, T blocks, R rows of a
block, L keys of a tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.head_layout import LANES, fill_lanes, heads_in_lanes, in_place
from moh_jax.ops.kernels.problem import (
  LOG2_E,
  Arrays,
  BlockSizes,
  Kernels,
  Problem,
  Tile,
  across,
  like,
  times,
)
from moh_jax.ops.kernels.tpu_plan import Plan, Tables, visit_of_step
from moh_jax.ops.target import Target


class Tpu(Kernels):
  """The kernels for TPUs."""

  tiles: ClassVar = {
    2: {256: BlockSizes.of((256, 1024), (256, 1024), (256, 512))},
    4: {256: BlockSizes.of((256, 512), (256, 512), (256, 512))},
  }
  few_rows = 768
  least_rows = 128

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """See `Kernels.unable`."""
    able = device.platform in ("cpu", "tpu")
    return "" if able else f"a TPU, this is a {device.platform} ({device.kind})"

  def check(self, sizes: BlockSizes) -> None:
    """See `Kernels.check`."""
    if sizes.rows % 8:
      raise ValueError(f"rows={sizes.rows} of a block must be a multiple of 8")

  def readable(self, dtype: jnp.dtype) -> jnp.dtype:
    """See `Kernels.readable`; TPUs have no float16."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype

  def arranged(self, x: jax.Array) -> jax.Array:
    """Arranges keys or values [B, M, K, D] as [B, M, K / m, W].

    m heads are side by side in the vector lanes: a set of them is read as one
    key/value head.
    """
    return fill_lanes(x, heads_in_lanes(*x.shape[2:]))

  def to_rows(self, problem: Problem, x: jax.Array) -> jax.Array:
    """Reorders pairs [B, N, H, D] to rows [T * R, W]; 0 in empty rows.

    Arrays of pairs are read and written as [B, S, N, W] with S = H / m sets of
    m heads: in this order XLA for TPUs computes them, and wants them for the
    products after. A row holds its own head's numbers in the lanes where the
    head's key/value head has its keys, and 0 in the others, which therefore add
    nothing to the logits. Of a result only the lanes of the row's own head are
    meant.

    Args:
      problem: the call, with keys [B, M, K / m, W].
      x: of the pairs.
    """
    tokens, dim = x.shape[1], x.shape[3]
    count = problem.head_dim // dim
    blocks = problem.blocks
    head, token = blocks.head[:, None], blocks.token
    index = head // count * tokens + jnp.minimum(token, tokens - 1)
    sets = fill_lanes(x, count).swapaxes(1, 2).reshape(-1, problem.head_dim)
    rows = jnp.take(sets, index, axis=0, mode="clip")  # [T, R, W]
    inside = (token < tokens)[..., None]
    if count > 1:
      held = head % count
      wanted = head // (problem.group // count) % count
      rows = _moved(rows, (wanted - held)[..., None], problem, dim)
      inside = inside & in_place(wanted, count, dim)
    rows = jnp.where(inside, rows, jnp.zeros((), x.dtype))
    return rows.reshape(-1, problem.head_dim)

  def to_pairs(self, problem: Problem, rows: jax.Array, dim: int) -> jax.Array:
    """Reorders rows [T * R, W] to pairs [B, N, H, D]; 0 if inactive.

    Args:
      problem: the call, with keys [B, M, K / m, W].
      rows: results of a kernel.
      dim: D.
    """
    batch, tokens, heads = problem.blocks.row.shape
    count = problem.head_dim // dim
    sets = heads // count

    def by_place(x: jax.Array) -> jax.Array:
      """Shapes [B, N, H] as [m, B, S, N]."""
      x = x.reshape(batch, tokens, sets, count)
      return x.transpose(3, 0, 2, 1)

    row = by_place(problem.blocks.row)
    active = by_place(problem.blocks.active)[..., None]
    out = jnp.zeros((batch, sets, tokens, problem.head_dim), rows.dtype)
    for i in range(count):
      taken = jnp.take(rows, row[i], axis=0, mode="clip")
      head = np.arange(sets) * count + i
      held = head // (problem.group // count) % count
      taken = _moved(taken, (i - held)[None, :, None, None], problem, dim)
      own = in_place(jnp.full((1, 1, 1), i), count, dim)
      out = jnp.where(active[i] & own, taken, out)
    return out.swapaxes(1, 2).reshape(batch, tokens, heads, dim)

  def forward(
    self, problem: Problem, q: jax.Array, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.forward`."""
    plan = Plan(problem, tile.keys, keys_first=False)
    outputs = problem.outputs(q, keys[1])
    return _call_by_rows(_forward_kernel, plan, q, keys, outputs)

  def query_gradient(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.query_gradient`."""
    plan = Plan(problem, tile.keys, keys_first=False)
    outputs = problem.query_gradients(rows[0])
    return _call_by_rows(_query_gradient_kernel, plan, rows, keys, outputs)

  def key_gradients(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.key_gradients`."""
    plan = Plan(problem, tile.keys, keys_first=True)
    cut = plan.cut
    scratch = [(cut.heads, cut.chunk * cut.keys, problem.head_dim)] * 2
    outputs = tuple(map(like, keys))
    results, visited = plan.call(
      _key_gradients_kernel, rows, keys, outputs, scratch
    )
    # No step writes the gradients of keys that no row visited.
    visited = jnp.repeat(visited, cut.chunk * cut.keys, axis=1)
    visited = jnp.repeat(visited[:, : problem.keys], cut.heads, axis=0)
    visited = visited.reshape(problem.batch, -1, problem.keys, 1).swapaxes(1, 2)

    def to_key_shape(x: jax.Array) -> jax.Array:
      """Shapes [B * K, J * L, D] as [B, M, K, D]."""
      x = x[:, : problem.keys].reshape(
        problem.batch, -1, *problem.k_shape[1::2]
      )
      return jnp.where(visited, x.swapaxes(1, 2), 0)

    return tuple(map(to_key_shape, results))


def _moved(
  x: jax.Array, places: jax.Array | np.ndarray, problem: Problem, dim: int
) -> jax.Array:
  """Moves what is in the lanes of one place to those of another.

  Args:
    x: [..., W].
    places: by how many places, broadcastable to x.
    problem: the call.
    dim: D, lanes of a place.
  """
  count = problem.head_dim // dim
  if problem.group == count:  # a query head has the place of its key/value head
    return x
  out = x
  for i in range(1, count):
    out = jnp.where(places % count == i, jnp.roll(x, i * dim, -1), out)
  return out


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of a grid.

  Attributes:
    plan: of the launch.
    lists: the tables.
    visit: the step's index in them.
    low: first block of rows within the window.
    high: end of these blocks.
    opens: whether it is the first step that adds to its rows, or keys.
    closes: whether it is the last one.
  """

  plan: Plan
  lists: Tables
  visit: jax.Array
  low: jax.Array
  high: jax.Array
  opens: jax.Array
  closes: jax.Array

  @classmethod
  def running(cls, plan: Plan, lists: Tables) -> "Step":
    """The step that is running."""
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
    low, high = lists.low[visit], lists.high[visit]
    high = jnp.where(works, high, low)
    return cls(plan, lists, visit, low, high, works & opens, works & closes)

  @property
  def first_tile(self) -> jax.Array:
    """The first tile of keys in memory."""
    return self.lists.chunk[self.visit] * self.plan.cut.chunk

  def each_block(self, work: Callable[[Any, Any, Any], None]) -> None:
    """Runs work(i, block, head) for every block of rows.

    i is its place in the window, `block` in the table, `head` its key/value
    head within the unit.
    """
    cut = self.plan.cut
    first_block = self.lists.window[self.visit] * cut.window
    first_head = self.lists.unit[self.visit] * cut.heads

    def one(i: jax.Array) -> None:
      block = first_block + i
      head = self.lists.head[block] - first_head if cut.heads > 1 else 0
      work(i, block, head)

    _loop(self.low, self.high, one)

  def each_tile(self, block: Any, work: Callable[[Any, bool], None]) -> None:
    """Runs work(j, masked) for the tiles in memory that a block's rows see.

    j is the tile's place in the chunk.
    """
    problem, chunk = self.plan.problem, self.plan.cut.chunk
    start, whole, end = (
      jnp.clip(x[block] - self.first_tile, 0, chunk) for x in self.lists[-3:]
    )
    if not problem.masks_by_value:
      _loop(start, whole, lambda j: work(j, False))
    # Without a causal mask only a last tile with padding needs one.
    padded = problem.keys % self.plan.keys
    if problem.masks_by_value or problem.visible.causal or padded:
      _loop(whole, end, lambda j: work(j, True))

  def seen(
    self, row_masks: tuple, key_masks: tuple, j: Any, *, rows_axis: int
  ) -> jax.Array:
    """Marks which keys of a tile a block's rows see.

    Args:
      row_masks: the rows' last visible keys and segments, [R, 1 or L] if
        rows_axis is 0, else [1, R]; None where the call has no such mask.
      key_masks: the keys' mask and segments, [1, L], or [L, 1 or R].
      j: the tile's place in the chunk.
      rows_axis: 0 gives [R, L], 1 gives [L, R].
    """
    (last, row_segments), (key_mask, segments) = row_masks, key_masks
    size, problem = self.plan.keys, self.plan.problem
    shape = (1, size) if rows_axis == 0 else (size, 1)
    position = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    position = position + (self.first_tile + j) * size
    result = position < problem.keys
    if last is not None:
      result = result & (position <= last)
    if key_mask is not None:
      result = result & (key_mask != 0)
    if segments is not None:
      result = result & (segments == row_segments)
    return result


def place(plan: Plan, head: Any, j: Any) -> tuple:
  """The index of a tile in what `Plan.keys_or_values` loads.

  Args:
    plan: of the launch.
    head: key/value head within the unit.
    j: the tile's place in the chunk.

  Returns:
    The index of [L, D].
  """
  return head, tile_of(plan, j), slice(None)


def tile_of(plan: Plan, j: Any) -> Any:
  """The keys of tile j among those in memory."""
  if plan.cut.chunk == 1:
    return slice(None)
  return pl.ds(pl.multiple_of(j * plan.keys, plan.keys), plan.keys)


def each_tile_in_memory(plan: Plan, work: Callable[[Any, Any], None]) -> None:
  """Runs work(head, j) for every tile of a unit's keys that is in memory."""
  chunk, heads = plan.cut.chunk, plan.cut.heads

  def one(i: jax.Array) -> None:
    head = lax.div(i, chunk) if heads > 1 else 0
    work(head, lax.rem(i, chunk))

  _loop(0, heads * chunk, one)


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


def _call_by_rows(
  kernel: Callable, plan: Plan, rows: Any, keys: Arrays, outputs: tuple
) -> Arrays:
  """Launches a kernel that adds to rows.

  Args:
    kernel: as for `Plan.call`.
    plan: of the launch.
    rows: arrays [T * R, D] or [T * R].
    keys: keys and values.
    outputs: shapes of rows [T * R, D], then of one number per row.
  """
  # Sums of a block outlive its step only where its keys come in chunks.
  blocks = plan.cut.window if plan.cut.chunks > 1 else 1
  size = blocks, plan.problem.rows
  scratch = [(*size, plan.problem.head_dim), (*size, LANES), (*size, LANES)]
  results, _ = plan.call(kernel, rows, keys, outputs, scratch)
  return tuple(x.reshape(y.shape) for x, y in zip(results, outputs))


def _forward_kernel(
  lists: Tables, q_ref: Any, k_ref: Any, v_ref: Any, row_masks: tuple,
  key_masks: tuple, out_ref: Any, sum_ref: Any, acc_ref: Any, highest_ref: Any,
  total_ref: Any, columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  step = Step.running(plan, lists)
  scale, widened = plan.problem.log2_scale, plan.problem.to_product_dtype

  def block(i: Any, block: Any, head: Any) -> None:
    at = i if plan.cut.chunks > 1 else 0

    @_when(plan, step.opens)
    def _() -> None:
      acc_ref[at] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
      highest_ref[at] = jnp.full(highest_ref.shape[1:], -jnp.inf, jnp.float32)
      total_ref[at] = jnp.zeros(total_ref.shape[1:], jnp.float32)

    _write_columns(row_masks, i, columns)

    def work(j: Any, masked: bool) -> None:
      where = place(plan, head, j)
      logits = across(q_ref[i], widened(k_ref[where])) * scale
      if masked:
        logits = _hide(step, logits, columns, key_masks, j)
      highest = highest_ref[at]
      new = jnp.maximum(highest, logits.max(1, keepdims=True))
      # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
      shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
      decay = jnp.exp2(highest - shift)
      weights = jnp.exp2(logits - repeat_lanes(shift, plan.keys))
      total_ref[at] = total_ref[at] * decay + weights.sum(1, keepdims=True)
      highest_ref[at] = new
      v = widened(v_ref[where])
      out = times(weights.astype(v.dtype), v)
      acc_ref[at] = acc_ref[at] * repeat_lanes(decay, out.shape[1]) + out

    step.each_tile(block, work)

    @_when(plan, step.closes)
    def _() -> None:
      total = total_ref[at]
      sees_keys = total > 0
      total = jnp.where(sees_keys, total, 1.0)
      out = acc_ref[at] / repeat_lanes(total, acc_ref.shape[2])
      out_ref[i] = out.astype(out_ref.dtype)
      shift = jnp.where(sees_keys, highest_ref[at], 0.0)
      sum_ref[i] = (shift + jnp.log(total) * LOG2_E).T[:1]

  step.each_block(block)


def _query_gradient_kernel(
  lists: Tables, rows: tuple, k_ref: Any, v_ref: Any, row_masks: tuple,
  key_masks: tuple, dq_ref: Any, inner_ref: Any, acc_ref: Any, sums_ref: Any,
  inners_ref: Any, columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  step = Step.running(plan, lists)
  q_ref, out_ref, sum_ref, grad_ref = rows

  def block(i: Any, block: Any, head: Any) -> None:
    at = i if plan.cut.chunks > 1 else 0

    @_when(plan, step.opens)
    def _() -> None:
      acc_ref[at] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
      sums_ref[at] = as_columns(sum_ref[i])
      out, grad = (x[i].astype(jnp.float32) for x in (out_ref, grad_ref))
      inner = (out * grad).sum(1, keepdims=True)
      inner = jnp.broadcast_to(inner, inners_ref.shape[1:])
      inners_ref[at] = inner
      inner_ref[i] = inner.T[:1]

    _write_columns(row_masks, i, columns)

    def work(j: Any, masked: bool) -> None:
      where = place(plan, head, j)
      logits = across(q_ref[i], k_ref[where]) * plan.problem.log2_scale
      if masked:
        logits = _hide(step, logits, columns, key_masks, j)
      weights = jnp.exp2(logits - repeat_lanes(sums_ref[at], plan.keys))
      inner = repeat_lanes(inners_ref[at], plan.keys)
      dlogits = weights * (across(grad_ref[i], v_ref[where]) - inner)
      acc_ref[at] += times(dlogits.astype(k_ref.dtype), k_ref[where])

    step.each_tile(block, work)

    @_when(plan, step.closes)
    def _() -> None:
      dq_ref[i] = (acc_ref[at] * plan.problem.scale).astype(dq_ref.dtype)

  step.each_block(block)


def _key_gradients_kernel(
  lists: Tables, rows: tuple, k_ref: Any, v_ref: Any, row_masks: tuple,
  key_masks: tuple, dk_ref: Any, dv_ref: Any, dk_sum: Any, dv_sum: Any,
  columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  step = Step.running(plan, lists)
  q_ref, sum_ref, inner_ref, grad_ref = rows

  @pl.when(step.opens)
  def _() -> None:
    def clear(head: Any, j: Any) -> None:
      where = place(plan, head, j)
      zeros = jnp.zeros((plan.keys, dk_sum.shape[2]), jnp.float32)
      dk_sum[where] = dv_sum[where] = zeros
      for row, column in zip(key_masks, columns):
        if row is not None:
          column[j] = as_columns(row[0, :, tile_of(plan, j)])

    each_tile_in_memory(plan, clear)

  def block(i: Any, block: Any, head: Any) -> None:
    # Logits are transposed, [L, R]: numbers per row then lie along lanes, as
    # they are loaded.
    def work(j: Any, masked: bool) -> None:
      q, grad = q_ref[i], grad_ref[i]
      where = place(plan, head, j)
      logits = across(k_ref[where], q) * plan.problem.log2_scale
      if masked:
        key_columns = _repeated(columns, j, plan.problem.rows)
        seen = step.seen(
          _rows(row_masks, i, slice(None)), key_columns, j, rows_axis=1
        )
        logits = jnp.where(seen, logits, -jnp.inf)
      weights = jnp.exp2(logits - sum_ref[i])
      dv_sum[where] += times(weights.astype(grad.dtype), grad)
      dlogits = weights * (across(v_ref[where], grad) - inner_ref[i])
      dk_sum[where] += times(dlogits.astype(q.dtype), q)

    step.each_tile(block, work)

  step.each_block(block)

  @pl.when(step.closes)
  def _() -> None:
    def write(head: Any, j: Any) -> None:
      where = place(plan, head, j)
      dk_ref[where] = (dk_sum[where] * plan.problem.scale).astype(dk_ref.dtype)
      dv_ref[where] = dv_sum[where].astype(dv_ref.dtype)

    each_tile_in_memory(plan, write)


def _hide(
  step: Step, logits: jax.Array, columns: tuple, key_masks: tuple, j: Any
) -> jax.Array:
  """Sets logits [R, L] of tile j to -inf where a row does not see a key."""
  plan = step.plan
  row_columns = _repeated(columns, 0, plan.keys)
  key_rows = _rows(key_masks, 0, tile_of(plan, j))
  seen = step.seen(row_columns, key_rows, j, rows_axis=0)
  return jnp.where(seen, logits, -jnp.inf)


def _when(plan: Plan, condition: jax.Array) -> Callable[[Callable], None]:
  """Like `pl.when`; always where all keys of a block meet it in one step."""
  if plan.cut.chunks > 1:
    return pl.when(condition)
  return lambda work: work()


def _rows(masks: tuple, i: Any, columns: Any) -> tuple:
  """Loads columns of the references' i-th rows, [1, X]."""
  return jax.tree.map(lambda x: x[i, :, columns], masks)


def _repeated(columns: tuple, i: Any, width: int) -> tuple:
  """Loads the references' i-th columns, [X, LANES], as [X, width]."""
  return jax.tree.map(lambda x: repeat_lanes(x[i], width), columns)


def _write_columns(masks: tuple, i: Any, columns: tuple) -> None:
  """Stores the i-th row of each mask, [1, X], as a column [X, LANES]."""

  def write(mask: Any, column: Any) -> None:
    column[0] = as_columns(mask[i])

  jax.tree.map(write, masks, columns)


def _loop(start: Any, end: Any, work: Callable[[Any], None]) -> None:
  lax.fori_loop(start, end, lambda i, _: work(i), None)
