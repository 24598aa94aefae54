"""The kernels for TPUs (Pallas Mosaic).

A step of the grid computes the logits of one block of rows and one tile of
keys. The first two kernels (forward, gradient of the queries) loop over the
keys of each block of rows and sum over them. The third (gradients of keys and
values) loops over all blocks of rows for each tile of keys and sums over those
that read the same key/value head; the table has them side by side. The softmax
is in base 2, which the hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, L keys of a tile, J tiles of keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import LOG2_E, Arrays, Problem, like
from moh_jax.ops.kernels.products import across, times
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.kernels.tpu_plan import (
  LANES,
  Plan,
  as_columns,
  repeat_lanes,
)


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
  """Launches a kernel that sums over the keys of each block of rows.

  Args:
    kernel: as for `Plan.call`.
    plan: of the launch.
    rows: arrays [T * R, D] or [T * R].
    keys: keys and values.
    outputs: shapes of rows [T * R, D], then of one number per row.
  """
  size = plan.problem.rows
  scratch = [(size, plan.problem.head_dim), (size, LANES), (size, LANES)]
  results = plan.call(kernel, rows, keys, outputs, scratch)
  return tuple(x.reshape(y.shape) for x, y in zip(results, outputs))


def key_gradients(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.key_gradients`."""
  plan = Plan(problem, tile.keys, keys_first=True)
  scratch = [(plan.keys, problem.head_dim)] * 2
  outputs = tuple(map(like, keys))
  dk, dv = plan.call(_key_gradients_kernel, rows, keys, outputs, scratch)
  # No step writes the gradients of a key/value head that no query chose.
  first = problem.blocks.first[:: problem.group]
  chosen = (first[1:] > first[:-1]).reshape(problem.batch, 1, -1, 1)

  def to_key_shape(x: jax.Array) -> jax.Array:
    """Shapes [B * K, J * L, D] as [B, M, K, D]."""
    x = x[:, : problem.keys].reshape(problem.batch, -1, *problem.k_shape[1::2])
    return jnp.where(chosen, x.swapaxes(1, 2), 0)

  return to_key_shape(dk), to_key_shape(dv)


def check_rows(rows: int) -> None:
  """See `Kernels.check_rows`."""
  if rows % 8:
    raise ValueError(f"rows={rows} of a block must be a multiple of 8")


def _forward_kernel(
  source: Any, kv_head: Any, unmasked: Any, end: Any, q_ref: Any, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, out_ref: Any, sum_ref: Any,
  acc_ref: Any, highest_ref: Any, total_ref: Any, columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  scale, widened = plan.problem.log2_scale, plan.problem.to_product_dtype
  with_keys, with_values = across, times
  if plan.problem.head_dim_first:
    with_keys, with_values = times, across

  @pl.when(j == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)
    highest_ref[...] = jnp.full_like(highest_ref, -jnp.inf)
    total_ref[...] = jnp.zeros_like(total_ref)
    _write_columns(row_masks, columns)

  def work(masked: bool) -> None:
    logits = with_keys(q_ref[0], widened(k_ref[0])) * scale
    if masked:
      row_columns = _repeated(columns, plan.keys)
      seen = plan.seen(row_columns, _rows(key_masks), j, rows_axis=0)
      logits = jnp.where(seen, logits, -jnp.inf)
    highest = highest_ref[...]
    new = jnp.maximum(highest, logits.max(1, keepdims=True))
    # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
    shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
    decay = jnp.exp2(highest - shift)
    weights = jnp.exp2(logits - repeat_lanes(shift, plan.keys))
    total_ref[...] = total_ref[...] * decay + weights.sum(1, keepdims=True)
    highest_ref[...] = new
    v = widened(v_ref[0])
    out = with_values(weights.astype(v.dtype), v)
    acc_ref[...] = acc_ref[...] * repeat_lanes(decay, out.shape[1]) + out

  plan.when_visible(j, unmasked[t], end[t], work)

  @pl.when(j == plan.key_tiles - 1)
  def _() -> None:
    total = total_ref[...]
    sees_keys = total > 0
    total = jnp.where(sees_keys, total, 1.0)
    out = acc_ref[...] / repeat_lanes(total, acc_ref.shape[1])
    out_ref[0] = out.astype(out_ref.dtype)
    shift = jnp.where(sees_keys, highest_ref[...], 0.0)
    sum_ref[0] = (shift + jnp.log(total) * LOG2_E).T[:1]


def _query_gradient_kernel(
  source: Any, kv_head: Any, unmasked: Any, end: Any, rows: tuple, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, dq_ref: Any, inner_ref: Any,
  acc_ref: Any, sums_ref: Any, inners_ref: Any, columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  q_ref, out_ref, sum_ref, grad_ref = rows

  @pl.when(j == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)
    sums_ref[...] = as_columns(sum_ref[0])
    out, grad = (x[0].astype(jnp.float32) for x in (out_ref, grad_ref))
    inner = (out * grad).sum(1, keepdims=True)
    inners_ref[...] = jnp.broadcast_to(inner, inners_ref.shape)
    inner_ref[0] = inners_ref[...].T[:1]
    _write_columns(row_masks, columns)

  def work(masked: bool) -> None:
    logits = across(q_ref[0], k_ref[0]) * plan.problem.log2_scale
    if masked:
      row_columns = _repeated(columns, plan.keys)
      seen = plan.seen(row_columns, _rows(key_masks), j, rows_axis=0)
      logits = jnp.where(seen, logits, -jnp.inf)
    weights = jnp.exp2(logits - repeat_lanes(sums_ref[...], plan.keys))
    inner = repeat_lanes(inners_ref[...], plan.keys)
    dlogits = weights * (across(grad_ref[0], v_ref[0]) - inner)
    acc_ref[...] += times(dlogits.astype(k_ref.dtype), k_ref[0])

  plan.when_visible(j, unmasked[t], end[t], work)

  @pl.when(j == plan.key_tiles - 1)
  def _() -> None:
    dq_ref[0] = (acc_ref[...] * plan.problem.scale).astype(dq_ref.dtype)


def _key_gradients_kernel(
  source: Any, kv_head: Any, unmasked: Any, end: Any, rows: tuple, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, dk_ref: Any, dv_ref: Any,
  dk_sum: Any, dv_sum: Any, columns: tuple, *, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  q_ref, sum_ref, inner_ref, grad_ref = rows
  last = plan.problem.num_blocks - 1
  head = kv_head[t]

  @pl.when((t == 0) | (head != kv_head[jnp.maximum(t - 1, 0)]))
  def _() -> None:
    dk_sum[...] = jnp.zeros_like(dk_sum)
    dv_sum[...] = jnp.zeros_like(dv_sum)
    _write_columns(key_masks, columns)

  # Logits are transposed, [L, R]: numbers per row then lie along lanes, as they
  # are loaded.
  def work(masked: bool) -> None:
    q, grad = q_ref[0], grad_ref[0]
    logits = across(k_ref[0], q) * plan.problem.log2_scale
    if masked:
      key_columns = _repeated(columns, plan.problem.rows)
      seen = plan.seen(_rows(row_masks), key_columns, j, rows_axis=1)
      logits = jnp.where(seen, logits, -jnp.inf)
    weights = jnp.exp2(logits - sum_ref[0])
    dv_sum[...] += times(weights.astype(grad.dtype), grad)
    dlogits = weights * (across(v_ref[0], grad) - inner_ref[0])
    dk_sum[...] += times(dlogits.astype(q.dtype), q)

  plan.when_visible(j, unmasked[t], end[t], work)

  @pl.when((t == last) | (head != kv_head[jnp.minimum(t + 1, last)]))
  def _() -> None:
    dk_ref[0] = (dk_sum[...] * plan.problem.scale).astype(dk_ref.dtype)
    dv_ref[0] = dv_sum[...].astype(dv_ref.dtype)


def _rows(masks: tuple) -> tuple:
  """Loads references to [1, 1, X] as rows [1, X]."""
  return jax.tree.map(lambda x: x[0], masks)


def _repeated(columns: tuple, width: int) -> tuple:
  """Loads references to [X, LANES] as [X, width]."""
  return jax.tree.map(lambda x: repeat_lanes(x[...], width), columns)


def _write_columns(masks: tuple, columns: tuple) -> None:
  """Stores each mask [1, 1, X] as a column [X, LANES] in scratch."""

  def write(mask: Any, column: Any) -> None:
    column[...] = as_columns(mask[0])

  jax.tree.map(write, masks, columns)
