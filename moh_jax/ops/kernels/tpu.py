"""The kernels for TPUs (Pallas Mosaic).

A step of the grid works on a window of rows of one key/value head (or of a few,
where sequences are short), with the head's keys in memory. It loops over the
window's blocks of rows, and for each over the tiles of keys that the block
sees. The first two kernels (forward, gradient of the queries) add to the rows
of a block; the third (gradients of keys and values) adds to the keys, which all
of a head's rows visit one after another. The softmax is in base 2, which the
hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, L keys of a tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import LOG2_E, Arrays, Problem, like
from moh_jax.ops.kernels.products import across, times
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.kernels.tpu_plan import Plan
from moh_jax.ops.kernels.tpu_step import (
  Step,
  as_columns,
  each_tile_in_memory,
  place,
  repeat_lanes,
  tile_of,
)
from moh_jax.ops.kernels.tpu_visits import Tables
from moh_jax.ops.lanes import LANES


def forward(problem: Problem, q: jax.Array, keys: Arrays, tile: Tile) -> Arrays:
  """See `Kernels.forward`."""
  plan = Plan(problem, tile.keys, keys_first=False)
  outputs = problem.outputs(q, keys[1])
  return _call_by_rows(_forward_kernel, plan, q, keys, outputs)


def query_gradient(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.query_gradient`."""
  plan = Plan(problem, tile.keys, keys_first=False)
  outputs = problem.query_gradients(rows[0])
  return _call_by_rows(_query_gradient_kernel, plan, rows, keys, outputs)


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


def key_gradients(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
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
    x = x[:, : problem.keys].reshape(problem.batch, -1, *problem.k_shape[1::2])
    return jnp.where(visited, x.swapaxes(1, 2), 0)

  return tuple(map(to_key_shape, results))


def check_rows(rows: int) -> None:
  """See `Kernels.check_rows`."""
  if rows % 8:
    raise ValueError(f"rows={rows} of a block must be a multiple of 8")


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
        row_columns = _repeated(columns, 0, plan.keys)
        key_rows = _rows(key_masks, 0, tile_of(plan, j))
        seen = step.seen(row_columns, key_rows, j, rows_axis=0)
        logits = jnp.where(seen, logits, -jnp.inf)
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
        row_columns = _repeated(columns, 0, plan.keys)
        key_rows = _rows(key_masks, 0, tile_of(plan, j))
        seen = step.seen(row_columns, key_rows, j, rows_axis=0)
        logits = jnp.where(seen, logits, -jnp.inf)
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
