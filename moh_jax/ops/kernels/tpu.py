"""The kernels for TPUs (Pallas Mosaic).

A step of the grid joins a block of rows with a block of keys. The first two
kernels run over the keys of a block of rows and sum over them; the third runs
over all blocks of rows for a block of keys and sums over those that read the
same key/value head, which follow each other. The softmax is in base 2, which
is what the hardware has.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, L keys of a block, J blocks of keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import LOG2_E, Problem
from moh_jax.ops.kernels.products import across, times
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.kernels.tpu_plan import LANES, Plan, as_columns, widen


def forward(
  problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, tile: Tile
) -> tuple[jax.Array, jax.Array]:
  """See `Kernels.forward`."""
  plan = Plan(problem, tile.keys, keys_first=False)
  masks = plan.row_masks()
  out, log_sums = plan.call(
    _forward_kernel,
    inputs=(plan.rows(q), plan.dense(k), plan.dense(v), masks,
            plan.key_masks()),
    outputs=(
      plan.rows(problem.output(q, v)),
      plan.rows(jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
    ),
    scratch=[(problem.rows, problem.head_dim)] + [(problem.rows, LANES)] * 2,
    columns=masks,
  )  # fmt: skip
  return out.reshape(q.shape), log_sums.reshape(-1)


def query_gradient(
  problem: Problem,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  out: jax.Array,
  log_sums: jax.Array,
  grad: jax.Array,
  tile: Tile,
) -> tuple[jax.Array, jax.Array]:
  """See `Kernels.query_gradient`."""
  plan = Plan(problem, tile.keys, keys_first=False)
  masks = plan.row_masks()
  dq, inner = plan.call(
    _query_gradient_kernel,
    inputs=(
      tuple(plan.rows(x) for x in (q, out, log_sums, grad)),
      plan.dense(k), plan.dense(v), masks, plan.key_masks(),
    ),
    outputs=(
      plan.rows(jax.ShapeDtypeStruct(q.shape, q.dtype)),
      plan.rows(jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
    ),
    scratch=[(problem.rows, problem.head_dim)] + [(problem.rows, LANES)] * 2,
    columns=masks,
  )  # fmt: skip
  return dq.reshape(q.shape), inner.reshape(-1)


def key_gradients(
  problem: Problem,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_sums: jax.Array,
  inner: jax.Array,
  grad: jax.Array,
  tile: Tile,
) -> tuple[jax.Array, jax.Array]:
  """See `Kernels.key_gradients`."""
  plan = Plan(problem, tile.keys, keys_first=True)
  masks = plan.key_masks()
  grads = plan.call(
    _key_gradients_kernel,
    inputs=(
      tuple(plan.rows(x) for x in (q, log_sums, inner, grad)),
      plan.dense(k), plan.dense(v), plan.row_masks(), masks,
    ),
    outputs=tuple(
      plan.dense(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)
    ),
    scratch=[(plan.keys, problem.head_dim)] * 2,
    columns=masks,
  )  # fmt: skip
  # No step writes the keys of a head that no query chose.
  first = problem.blocks.first[:: problem.group]
  some = (first[1:] > first[:-1]).reshape(problem.batch, 1, -1, 1)

  def dense(x: jax.Array) -> jax.Array:
    x = x[:, : problem.keys].reshape(problem.batch, -1, *k.shape[1::2])
    return jnp.where(some, x.swapaxes(1, 2), 0)

  dk, dv = grads
  return dense(dk), dense(dv)


def check_rows(rows: int) -> None:
  """Raises ValueError if blocks cannot have so many rows."""
  if rows % 8:
    raise ValueError(f"rows={rows} of a block must be a multiple of 8")


def _forward_kernel(
  own: Any, kv_head: Any, least: Any, most: Any, q_ref: Any, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, out_ref: Any, sum_ref: Any,
  acc_ref: Any, highest_ref: Any, total_ref: Any, *columns: Any, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  factor, widened = plan.problem.factor, plan.problem.widen
  with_keys, with_values = across, times
  if plan.transposed:
    with_keys, with_values = times, across
  columns = _like(row_masks, columns)

  @pl.when(j == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)
    highest_ref[...] = jnp.full_like(highest_ref, -jnp.inf)
    total_ref[...] = jnp.zeros_like(total_ref)
    _turn(row_masks, columns)

  def work(masked: bool) -> None:
    logits = with_keys(q_ref[0], widened(k_ref[0])) * factor
    if masked:
      mine = _wide(columns, plan.keys)
      seen = plan.seen(mine, _rows(key_masks), j, rows_axis=0)
      logits = jnp.where(seen, logits, -jnp.inf)
    highest = highest_ref[...]
    new = jnp.maximum(highest, logits.max(1, keepdims=True))
    # A row that has seen no key: any finite number keeps exp2(-inf) = 0.
    shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
    decay = jnp.exp2(highest - shift)
    weights = jnp.exp2(logits - widen(shift, plan.keys))
    total_ref[...] = total_ref[...] * decay + weights.sum(1, keepdims=True)
    highest_ref[...] = new
    v = widened(v_ref[0])
    out = with_values(weights.astype(v.dtype), v)
    acc_ref[...] = acc_ref[...] * widen(decay, out.shape[1]) + out

  plan.at_work(j, least[t], most[t], work)

  @pl.when(j == plan.key_blocks - 1)
  def _() -> None:
    total = total_ref[...]
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = acc_ref[...] / widen(total, acc_ref.shape[1])
    out_ref[0] = out.astype(out_ref.dtype)
    shift = jnp.where(some, highest_ref[...], 0.0)
    sum_ref[0] = (shift + jnp.log(total) * LOG2_E).T[:1]


def _query_gradient_kernel(
  own: Any, kv_head: Any, least: Any, most: Any, rows: tuple, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, dq_ref: Any, inner_ref: Any,
  acc_ref: Any, sums_ref: Any, inners_ref: Any, *columns: Any, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  q_ref, out_ref, sum_ref, grad_ref = rows
  columns = _like(row_masks, columns)

  @pl.when(j == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)
    sums_ref[...] = as_columns(sum_ref[0])
    out, grad = (x[0].astype(jnp.float32) for x in (out_ref, grad_ref))
    inner = (out * grad).sum(1, keepdims=True)
    inners_ref[...] = jnp.broadcast_to(inner, inners_ref.shape)
    inner_ref[0] = inners_ref[...].T[:1]
    _turn(row_masks, columns)

  def work(masked: bool) -> None:
    logits = across(q_ref[0], k_ref[0]) * plan.problem.factor
    if masked:
      mine = _wide(columns, plan.keys)
      seen = plan.seen(mine, _rows(key_masks), j, rows_axis=0)
      logits = jnp.where(seen, logits, -jnp.inf)
    weights = jnp.exp2(logits - widen(sums_ref[...], plan.keys))
    inner = widen(inners_ref[...], plan.keys)
    dlogits = weights * (across(grad_ref[0], v_ref[0]) - inner)
    acc_ref[...] += times(dlogits.astype(k_ref.dtype), k_ref[0])

  plan.at_work(j, least[t], most[t], work)

  @pl.when(j == plan.key_blocks - 1)
  def _() -> None:
    dq_ref[0] = (acc_ref[...] * plan.problem.scale).astype(dq_ref.dtype)


def _key_gradients_kernel(
  own: Any, kv_head: Any, least: Any, most: Any, rows: tuple, k_ref: Any,
  v_ref: Any, row_masks: tuple, key_masks: tuple, dk_ref: Any, dv_ref: Any,
  dk_sum: Any, dv_sum: Any, *columns: Any, plan: Plan,
) -> None:  # fmt: skip
  t, j = plan.step()
  q_ref, sum_ref, inner_ref, grad_ref = rows
  columns = _like(key_masks, columns)
  last = plan.problem.num_blocks - 1
  head = kv_head[t]

  @pl.when((t == 0) | (head != kv_head[jnp.maximum(t - 1, 0)]))
  def _() -> None:
    dk_sum[...] = jnp.zeros_like(dk_sum)
    dv_sum[...] = jnp.zeros_like(dv_sum)
    _turn(key_masks, columns)

  # Everything is transposed, [L, R]: what belongs to rows lies along lanes.
  def work(masked: bool) -> None:
    q, grad = q_ref[0], grad_ref[0]
    logits = across(k_ref[0], q) * plan.problem.factor
    if masked:
      theirs = _wide(columns, plan.problem.rows)
      seen = plan.seen(_rows(row_masks), theirs, j, rows_axis=1)
      logits = jnp.where(seen, logits, -jnp.inf)
    weights = jnp.exp2(logits - sum_ref[0])
    dv_sum[...] += times(weights.astype(grad.dtype), grad)
    dlogits = weights * (across(v_ref[0], grad) - inner_ref[0])
    dk_sum[...] += times(dlogits.astype(q.dtype), q)

  plan.at_work(j, least[t], most[t], work)

  @pl.when((t == last) | (head != kv_head[jnp.minimum(t + 1, last)]))
  def _() -> None:
    dk_ref[0] = (dk_sum[...] * plan.problem.scale).astype(dk_ref.dtype)
    dv_ref[0] = dv_sum[...].astype(dv_ref.dtype)


def _rows(masks: tuple) -> tuple:
  """[1, X] of references to [1, 1, X]."""
  return jax.tree.map(lambda x: x[0], masks)


def _wide(columns: tuple, width: int) -> tuple:
  """[X, width] of references to [X, LANES]."""
  return jax.tree.map(lambda x: widen(x[...], width), columns)


def _like(masks: tuple, columns: tuple) -> tuple:
  """Scratch of masks, None where there is no mask."""
  return jax.tree.unflatten(jax.tree.structure(masks), columns)


def _turn(masks: tuple, columns: tuple) -> None:
  """Writes masks as columns."""

  def write(mask: Any, column: Any) -> None:
    column[...] = as_columns(mask[0])

  jax.tree.map(write, masks, columns)
