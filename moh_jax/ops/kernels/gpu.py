"""The kernels for GPUs (Pallas Triton).

A program of the first two kernels holds some rows of one head and runs over
the keys; a program of the third holds some keys of one key/value head and runs
over the rows of the query heads that read it, whose number is in the table.
Loops are split in two: where every row of the program sees every key, nothing
is masked. The softmax is in base 2, which is what the hardware has.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
program, L keys of a program, P programs that share the rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.gpu_plan import SMALLEST, Parts, Plan, product
from moh_jax.ops.kernels.problem import LOG2_E, Problem
from moh_jax.ops.kernels.products import times
from moh_jax.ops.kernels.sizes import Tile


def forward(
  problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, tile: Tile
) -> tuple[jax.Array, jax.Array]:
  """See `Kernels.forward`."""
  plan = Plan(problem, tile)
  return plan.call(
    _forward_kernel,
    grid=(plan.programs,),
    inputs=(
      plan.row_table(),
      plan.own_rows(q),
      (plan.dense(k), plan.dense(v)),
      (plan.row_masks(plan.own_rows), plan.key_masks()),
    ),
    outputs=(
      plan.own_rows(problem.output(q, v)),
      plan.own_rows(jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
    ),
  )


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
  plan = Plan(problem, tile)
  return plan.call(
    _query_gradient_kernel,
    grid=(plan.programs,),
    inputs=(
      plan.row_table(),
      tuple(plan.own_rows(x) for x in (q, out, log_sums, grad)),
      (plan.dense(k), plan.dense(v)),
      (plan.row_masks(plan.own_rows), plan.key_masks()),
    ),
    outputs=(
      plan.own_rows(jax.ShapeDtypeStruct(q.shape, q.dtype)),
      plan.own_rows(jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
    ),
  )


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
  plan = Plan(problem, tile)
  return plan.call(
    _key_gradients_kernel,
    grid=(plan.key_blocks, problem.batch * problem.kv_heads),
    inputs=(
      plan.key_table(),
      tuple(plan.all_rows(x) for x in (q, log_sums, inner, grad)),
      (plan.dense(k), plan.dense(v)),
      (plan.row_masks(plan.all_rows), plan.key_masks()),
    ),
    outputs=tuple(
      plan.dense(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)
    ),
  )


def _forward_kernel(
  table: tuple, q_ref: Any, keys: tuple, masks: tuple, out_ref: Any,
  sum_ref: Any, *, plan: Plan,
) -> None:  # fmt: skip
  heads, used, reach = table
  k_ref, v_ref = keys
  index = plan.program()
  t = jax.lax.div(index, plan.parts)

  @pl.when(t < used[0])
  def _() -> None:
    place = plan.place(jax.lax.div(heads[t], plan.problem.group))
    row_masks = jax.tree.map(lambda x: x[...], masks[0])
    q = plan.load(q_ref)

    def step(j: jax.Array, carry: tuple, *, masked: bool) -> tuple:
      acc, highest, total = carry
      seen = None
      if masked:
        seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=0)
      k = plan.load_keys(k_ref, place, j, last=masked)
      logits = plan.logits(q, _widen(plan.problem, k), seen)
      new = jnp.maximum(highest, logits.max(1))
      shift = new
      if masked:
        # A row that has seen no key: any finite number keeps exp2(-inf) = 0.
        shift = jnp.where(new == -jnp.inf, 0.0, new)
      decay = jnp.exp2((highest - shift) * plan.factor)
      weights = plan.weights(logits, (shift * plan.factor)[:, None])
      total = total * decay + weights.sum(1)
      v = plan.load_keys(v_ref, place, j, last=masked)
      v = _widen(plan.problem, v)
      weights = weights.astype(v[0].dtype)
      acc = tuple(x * decay[:, None] for x in acc)
      return _add(acc, weights, v), new, total

    none = jnp.full(plan.rows, -jnp.inf, jnp.float32)
    start = plan.zeros(plan.rows), none, jnp.zeros_like(none)
    acc, highest, total = plan.over_keys(reach, index, step, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    norm = (1 / total)[:, None]
    plan.store(out_ref, tuple(x * norm for x in acc))
    shift = jnp.where(some, highest, 0.0) * plan.factor
    sum_ref[...] = shift + jnp.log(total) * LOG2_E


def _query_gradient_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dq_ref: Any,
  inner_ref: Any, *, plan: Plan,
) -> None:  # fmt: skip
  heads, used, reach = table
  q_ref, out_ref, sum_ref, grad_ref = rows
  k_ref, v_ref = keys
  index = plan.program()
  t = jax.lax.div(index, plan.parts)

  @pl.when(t < used[0])
  def _() -> None:
    place = plan.place(jax.lax.div(heads[t], plan.problem.group))
    row_masks = jax.tree.map(lambda x: x[...], masks[0])
    q, grad = plan.load(q_ref), plan.load(grad_ref)
    log_sum = sum_ref[...][:, None]
    inner = sum(
      (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)
      for x, y in zip(plan.load(out_ref), grad)
    )
    inner_ref[...] = inner

    def step(j: jax.Array, dq: Parts, *, masked: bool) -> Parts:
      seen = None
      if masked:
        seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=0)
      k = plan.load_keys(k_ref, place, j, last=masked)
      v = plan.load_keys(v_ref, place, j, last=masked)
      weights = plan.weights(plan.logits(q, k, seen), log_sum)
      dlogits = weights * (product(grad, v) - inner[:, None])
      return _add(dq, dlogits.astype(k_ref.dtype), k)

    dq = plan.over_keys(reach, index, step, plan.zeros(plan.rows))
    plan.store(dq_ref, tuple(x * plan.problem.scale for x in dq))


def _key_gradients_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dk_ref: Any,
  dv_ref: Any, *, plan: Plan,
) -> None:  # fmt: skip
  q_ref, sum_ref, inner_ref, grad_ref = rows
  k_ref, v_ref = keys
  j, head = pl.program_id(0), pl.program_id(1)
  place = plan.place(head)
  k = plan.load_keys(k_ref, place, j, last=True)
  v = plan.load_keys(v_ref, place, j, last=True)

  # Everything is transposed, [L, r], so that the weights are left operands.
  def step(i: jax.Array, carry: tuple, *, masked: bool) -> tuple:
    dk, dv = carry
    span = pl.ds(i * plan.rows, plan.rows)
    seen = None
    if masked:
      row_masks = jax.tree.map(lambda x: x[span], masks[0])
      seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=1)
    q, grad = plan.load(q_ref, span), plan.load(grad_ref, span)
    log_sum, inner = sum_ref[span][None], inner_ref[span][None]
    weights = plan.weights(plan.logits(k, q, seen), log_sum)
    dv = _add(dv, weights.astype(grad_ref.dtype), grad)
    dlogits = weights * (product(v, grad) - inner)
    return _add(dk, dlogits.astype(q_ref.dtype), q), dv

  zeros = plan.zeros(plan.keys)
  dk, dv = plan.over_rows(table, j, head, step, (zeros, zeros))
  dk = tuple(x * plan.problem.scale for x in dk)
  plan.store_keys(dk_ref, dk, place, j)
  plan.store_keys(dv_ref, dv, place, j)


def _widen(problem: Problem, keys: Parts) -> Parts:
  return tuple(problem.widen(x) for x in keys)


def _add(total: Parts, weights: jax.Array, rows: Parts) -> Parts:
  """Adds weights [X, Y] times rows [Y, D] to [X, D]."""
  return tuple(x + times(weights, y) for x, y in zip(total, rows))


def check_rows(rows: int) -> None:
  """Raises ValueError if blocks cannot have so many rows."""
  if rows < SMALLEST or rows & (rows - 1):
    raise ValueError(
      f"rows={rows} of a block must be a power of two of at least {SMALLEST}"
    )
