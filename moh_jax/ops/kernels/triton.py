"""The kernels for GPUs (Pallas Triton).

The matrix of logits is cut into tiles of r rows and L keys. A program of the
first two kernels (forward, gradient of the queries) holds one tile's rows and
loops over the tiles of keys. A program of the third (gradients of keys and
values) holds the keys of one tile of one key/value head and loops over the
tiles of rows of the query heads that read it, as many as the table has. Every
loop is split in two: tiles whose rows all see all keys skip the masks. The
softmax is in base 2, which the hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
tile, L keys of a tile, P tiles of rows in all blocks, J tiles of keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.problem import LOG2_E, Arrays, Problem
from moh_jax.ops.kernels.products import times
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.kernels.triton_plan import Plan
from moh_jax.ops.kernels.triton_program import (
  SMALLEST,
  Program,
  Slices,
  product,
)


def forward(problem: Problem, q: jax.Array, keys: Arrays, tile: Tile) -> Arrays:
  """See `Kernels.forward`."""
  plan, outputs = Plan(problem, tile), problem.outputs(q, keys[1])
  queries = problem.blocks.pair, plan.all_rows(q.reshape(-1, q.shape[-1]))
  return plan.call_by_rows(_forward_kernel, queries, keys, outputs)


def query_gradient(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.query_gradient`."""
  plan, outputs = Plan(problem, tile), problem.query_gradients(rows[0])
  return plan.call_by_rows(_query_gradient_kernel, rows, keys, outputs)


def key_gradients(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.key_gradients`."""
  return Plan(problem, tile).call_by_keys(_key_gradients_kernel, rows, keys)


def _forward_kernel(
  table: tuple, queries: tuple, keys: tuple, masks: tuple, out_ref: Any,
  sum_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  heads, first, bounds = table
  pair_ref, q_ref = queries
  k_ref, v_ref = keys
  index = plan.row_tile(pl.program_id(0))
  t = jax.lax.div(index, plan.tiles_per_block)

  @pl.when(t < first[plan.problem.num_heads])
  def _() -> None:
    place = plan.place(jax.lax.div(heads[t], plan.problem.group))
    row_masks = jax.tree.map(lambda x: x[...], masks[0])
    # Empty rows are 0, as in the gradients: these use the sums of this pass.
    q = plan.load_at(q_ref, pair_ref[...])

    def step(j: jax.Array, carry: tuple, *, masked: bool) -> tuple:
      acc, highest, total = carry
      seen = None
      if masked:
        seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=0)
      k = plan.load_keys(k_ref, place, j, last=masked)
      logits = plan.logits(q, _widened(plan.problem, k), seen)
      new = jnp.maximum(highest, logits.max(1))
      shift = new
      if masked:
        # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
        shift = jnp.where(new == -jnp.inf, 0.0, new)
      decay = jnp.exp2((highest - shift) * plan.exponent_scale)
      weights = plan.weights(logits, (shift * plan.exponent_scale)[:, None])
      total = total * decay + weights.sum(1)
      v = plan.load_keys(v_ref, place, j, last=masked)
      v = _widened(plan.problem, v)
      weights = weights.astype(v[0].dtype)
      acc = tuple(x * decay[:, None] for x in acc)
      return _add(acc, weights, v), new, total

    lowest = jnp.full(plan.rows, -jnp.inf, jnp.float32)
    start = plan.zeros(plan.rows), lowest, jnp.zeros_like(lowest)
    acc, highest, total = plan.over_keys(bounds, index, step, start)
    sees_keys = total > 0
    total = jnp.where(sees_keys, total, 1.0)
    norm = (1 / total)[:, None]
    plan.store(out_ref, tuple(x * norm for x in acc))
    shift = jnp.where(sees_keys, highest, 0.0) * plan.exponent_scale
    sum_ref[...] = shift + jnp.log(total) * LOG2_E


def _query_gradient_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dq_ref: Any,
  inner_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  heads, first, bounds = table
  q_ref, out_ref, sum_ref, grad_ref = rows
  k_ref, v_ref = keys
  index = plan.row_tile(pl.program_id(0))
  t = jax.lax.div(index, plan.tiles_per_block)

  @pl.when(t < first[plan.problem.num_heads])
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

    def step(j: jax.Array, dq: Slices, *, masked: bool) -> Slices:
      seen = None
      if masked:
        seen = plan.seen(row_masks, masks[1], place[0], j, rows_axis=0)
      k = plan.load_keys(k_ref, place, j, last=masked)
      v = plan.load_keys(v_ref, place, j, last=masked)
      weights = plan.weights(plan.logits(q, k, seen), log_sum)
      dlogits = weights * (product(grad, v) - inner[:, None])
      return _add(dq, dlogits.astype(k_ref.dtype), k)

    dq = plan.over_keys(bounds, index, step, plan.zeros(plan.rows))
    plan.store(dq_ref, tuple(x * plan.problem.scale for x in dq))


def _key_gradients_kernel(
  table: tuple, rows: tuple, keys: tuple, masks: tuple, dk_ref: Any,
  dv_ref: Any, *, plan: Program,
) -> None:  # fmt: skip
  q_ref, sum_ref, inner_ref, grad_ref = rows
  k_ref, v_ref = keys
  j, head = pl.program_id(0), pl.program_id(1)
  place = plan.place(head)
  k = plan.load_keys(k_ref, place, j, last=True)
  v = plan.load_keys(v_ref, place, j, last=True)

  # Logits are transposed, [L, r]: the weights are then left operands of both
  # products, which need no transposition in registers.
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


def _widened(problem: Problem, keys: Slices) -> Slices:
  return tuple(problem.to_product_dtype(x) for x in keys)


def _add(total: Slices, weights: jax.Array, rows: Slices) -> Slices:
  """Adds weights [X, Y] times rows [Y, D] to [X, D]."""
  return tuple(x + times(weights, y) for x, y in zip(total, rows))


def check_rows(rows: int) -> None:
  """See `Kernels.check_rows`."""
  if rows < SMALLEST or rows & (rows - 1):
    raise ValueError(
      f"rows={rows} of a block must be a power of two of at least {SMALLEST}"
    )
