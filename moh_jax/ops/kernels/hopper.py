"""The kernels for NVIDIA Hopper (Pallas Mosaic GPU).

The matrix of logits is cut into tiles of r rows and L keys. Work of the first
two kernels (forward, gradient of the queries) is a tile of rows and a loop over
the tiles of keys that it reads. Work of the third (gradients of keys and
values) is a tile of keys of one key/value head and a loop over the tiles of
rows, of all query heads of its group, that read it. Each of two warpgroups
computes half of a tile, a third one copies tiles ahead of them. The softmax is
in base 2, which the hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
tile, L keys of a tile, P tiles of rows in all blocks, J tiles of keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.hopper_launch import Launch, RowWork
from moh_jax.ops.kernels.hopper_program import PART, loop, row
from moh_jax.ops.kernels.problem import LOG2_E, Arrays, Problem
from moh_jax.ops.kernels.sizes import Tile


def forward(problem: Problem, q: jax.Array, keys: Arrays, tile: Tile) -> Arrays:
  """See `Kernels.forward`."""
  outputs = problem.outputs(q, keys[1])
  return Launch(problem, tile).by_rows(
    _forward_kernel, (q,), (), keys, outputs, in_turns=True
  )


def _forward_kernel(
  launch: Launch, part: RowWork, tiles: tuple, others: tuple, outputs: tuple
) -> None:
  del others
  out_ref, sum_ref = outputs
  dim = launch.problem.head_dim
  own = tiles[0].at[pl.ds(part.consumer * PART, PART)]
  first = part.work.tile * launch.rows + part.consumer * PART
  k_ring, v_ring = part.rings
  hide = launch.hide_from_rows(part, first)

  def step(j: jax.Array, carry: tuple) -> tuple:
    acc, highest, total = carry
    turn = part.offset + j
    [k] = k_ring.take(turn)
    logits = launch.logits(launch.across(own, k, part.turns.switch))
    k_ring.release(turn)
    logits = hide(logits, j)
    new = jnp.maximum(highest, logits.max(1))
    # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
    shift = jnp.where(new == -jnp.inf, 0.0, new) * launch.exponent_scale
    decay = jnp.exp2(highest * launch.exponent_scale - shift)
    weights = launch.weights(logits, row(shift, logits.shape))
    total = total * decay + weights.sum(1)
    acc = acc * row(decay, acc.shape)
    weights = weights.astype(own.dtype)
    part.turns.switch()
    [v] = v_ring.take(turn)
    [acc] = launch.add_products((acc, weights, v))
    v_ring.release(turn)
    return acc, new, total

  start = launch.zeros(dim), launch.per_row(-jnp.inf), launch.per_row(0.0)
  acc, highest, total = loop(part.work.begin, part.work.end, step, start)
  sees_keys = total > 0
  total = jnp.where(sees_keys, total, 1.0)
  own[...] = (acc * row(1 / total, acc.shape)).astype(own.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(own, out_ref.at[pl.ds(first, PART)])
  shift = jnp.where(sees_keys, highest, 0.0) * launch.exponent_scale
  sum_ref[pl.ds(first, PART)] = shift + jnp.log(total) * LOG2_E
  plgpu.wait_smem_to_gmem(0)


def query_gradient(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.query_gradient`."""
  q, out, log_sums, grad = rows
  return Launch(problem, tile).by_rows(
    _query_gradient_kernel, (q, grad), (out, log_sums), keys,
    problem.query_gradients(q),
  )  # fmt: skip


def _query_gradient_kernel(
  launch: Launch, part: RowWork, tiles: tuple, others: tuple, outputs: tuple
) -> None:
  out_ref, sums_ref = others
  dq_ref, inner_ref = outputs
  q, grad = (x.at[pl.ds(part.consumer * PART, PART)] for x in tiles)
  first = part.work.tile * launch.rows + part.consumer * PART
  k_ring, v_ring = part.rings
  hide = launch.hide_from_rows(part, first)
  log_sums = launch.load_per_row(sums_ref, first)
  out = launch.load_rows(out_ref, first).astype(jnp.float32)
  inner = (out * grad[...].astype(jnp.float32)).sum(1)
  inner_ref[pl.ds(first, PART)] = inner

  def step(j: jax.Array, dq: jax.Array) -> jax.Array:
    turn = part.offset + j
    [k], [v] = k_ring.take(turn), v_ring.take(turn)

    def weigh(products: jax.Array) -> jax.Array:
      logits = hide(launch.logits(products), j)
      return launch.weights(logits, row(log_sums, logits.shape))

    weights, dweights = launch.across_both((q, k), weigh, (grad, v))
    v_ring.release(turn)
    dlogits = weights * (dweights - row(inner, weights.shape))
    [dq] = launch.add_products((dq, dlogits.astype(k.dtype), k))
    k_ring.release(turn)
    return dq

  dq = launch.zeros(launch.problem.head_dim)
  dq = loop(part.work.begin, part.work.end, step, dq)
  q[...] = (dq * launch.problem.scale).astype(q.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(q, dq_ref.at[pl.ds(first, PART)])
  plgpu.wait_smem_to_gmem(0)
