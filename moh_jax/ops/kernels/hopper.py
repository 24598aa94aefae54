"""The kernels for NVIDIA Hopper (Pallas Mosaic GPU).

The matrix of logits is cut into tiles of r rows and L keys. Work of the first
two kernels (forward, gradient of the queries) is a tile of rows and a loop over
the tiles of keys that it reads. Work of the third (gradients of keys and
values) is a tile of keys of one key/value head and a loop over the tiles of
rows, of all query heads of its group, that read it. Two warpgroups compute, a
third one copies tiles ahead of them. The softmax is in base 2, which the
hardware computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
tile, L keys of a tile, P tiles of rows in all blocks, J tiles of keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.hopper_keys import KeyLaunch, KeyPart
from moh_jax.ops.kernels.hopper_program import PART, column, row
from moh_jax.ops.kernels.hopper_rows import RowLaunch, RowPart
from moh_jax.ops.kernels.problem import LOG2_E, Arrays, Problem
from moh_jax.ops.kernels.sizes import Tile


def forward(problem: Problem, q: jax.Array, keys: Arrays, tile: Tile) -> Arrays:
  """See `Kernels.forward`."""
  return RowLaunch(problem, tile, tile.rows // PART).run_kernel(
    _forward_kernel, (q,), (), keys, problem.outputs(q, keys[1]), in_turns=True
  )


def query_gradient(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.query_gradient`."""
  q, out, log_sums, grad = rows
  return RowLaunch(problem, tile, tile.rows // PART).run_kernel(
    _query_gradient_kernel, (q, grad), (out, log_sums), keys,
    problem.query_gradients(q),
  )  # fmt: skip


def key_gradients(
  problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
) -> Arrays:
  """See `Kernels.key_gradients`."""
  return KeyLaunch(problem, tile, 2).run_kernel(
    _key_gradients_kernel, rows, keys
  )


def _forward_kernel(
  part: RowPart, tiles: tuple, others: tuple, outputs: tuple
) -> None:
  del others
  launch, (out_ref, sum_ref) = part.launch, outputs
  q = part.own(tiles[0])
  span = pl.ds(part.first, PART)

  def step(turn: jax.Array, hide: Callable, carry: tuple) -> tuple:
    acc, highest, total = carry
    [k] = part.keys.take(turn)
    logits = launch.logits(launch.across(q, k, part.turns.switch))
    part.keys.release(turn)
    logits = hide(logits)
    new = jnp.maximum(highest, logits.max(1))
    # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
    shift = jnp.where(new == -jnp.inf, 0.0, new) * launch.exponent_scale
    decay = jnp.exp2(highest * launch.exponent_scale - shift)
    weights = launch.weights(logits, row(shift, logits.shape))
    total = total * decay + weights.sum(1)
    acc = acc * row(decay, acc.shape)
    weights = weights.astype(q.dtype)
    part.turns.switch()
    [v] = part.values.take(turn)
    [acc] = launch.add_products((acc, weights, v))
    part.values.release(turn)
    return acc, new, total

  zeros = launch.zeros(launch.problem.head_dim)
  start = zeros, launch.per_row(-jnp.inf), launch.per_row(0.0)
  acc, highest, total = part.over_keys(step, start)
  sees_keys = total > 0
  total = jnp.where(sees_keys, total, 1.0)
  _store(acc * row(1 / total, acc.shape), q, out_ref.at[span])
  shift = jnp.where(sees_keys, highest, 0.0) * launch.exponent_scale
  sum_ref[span] = shift + jnp.log(total) * LOG2_E
  plgpu.wait_smem_to_gmem(0)


def _query_gradient_kernel(
  part: RowPart, tiles: tuple, others: tuple, outputs: tuple
) -> None:
  launch, (out_ref, sums_ref), (dq_ref, inner_ref) = part.launch, others, outputs
  q, grad = map(part.own, tiles)
  span = pl.ds(part.first, PART)
  log_sums = launch.load_per_row(sums_ref, part.first)
  out = launch.load_rows(out_ref, part.first).astype(jnp.float32)
  inner = (out * grad[...].astype(jnp.float32)).sum(1)
  inner_ref[span] = inner

  def step(turn: jax.Array, hide: Callable, dq: jax.Array) -> jax.Array:
    [k], [v] = part.keys.take(turn), part.values.take(turn)

    def weigh(products: jax.Array) -> jax.Array:
      logits = hide(launch.logits(products))
      return launch.weights(logits, row(log_sums, logits.shape))

    weights, dweights = launch.across_both((q, k), weigh, (grad, v))
    part.values.release(turn)
    dlogits = weights * (dweights - row(inner, weights.shape))
    [dq] = launch.add_products((dq, dlogits.astype(k.dtype), k))
    part.keys.release(turn)
    return dq

  dq = part.over_keys(step, launch.zeros(launch.problem.head_dim))
  _store(dq * launch.problem.scale, q, dq_ref.at[span])
  plgpu.wait_smem_to_gmem(0)


def _key_gradients_kernel(
  part: KeyPart, tiles: tuple, outputs: tuple
) -> jax.Array:
  launch = part.launch
  k, v = map(part.own, tiles)

  # Logits are transposed, [PART, r]: the weights are then left operands of both
  # products, as registers can be.
  def step(turn: jax.Array, hide: Callable, carry: tuple) -> tuple:
    q, sums_ref, inner_ref, grad = part.rows.take(turn)

    dk, dv = carry
    logits = hide(launch.logits(launch.across(k, q)))
    log_sums = column(launch.load_per_column(sums_ref), logits.shape)
    weights = launch.weights(logits, log_sums)
    # One product after the other: registers for two at once would not suffice.
    [dv] = launch.add_products((dv, weights.astype(grad.dtype), grad))
    inner = column(launch.load_per_column(inner_ref), weights.shape)
    dlogits = weights * launch.add_across(-inner, v, grad)
    [dk] = launch.add_products((dk, dlogits.astype(q.dtype), q))
    part.rows.release(turn)
    return dk, dv

  zeros = launch.zeros(launch.problem.head_dim)
  done, (dk, dv) = part.over_rows(step, (zeros, zeros))
  _store(dk * launch.problem.scale, k, part.place(outputs[0]))
  _store(dv, v, part.place(outputs[1]))
  plgpu.wait_smem_to_gmem(0)
  return done


def _store(values: jax.Array, tile: Any, place: Any) -> None:
  """Starts to write a matrix to global memory, through a tile not needed."""
  tile[...] = values.astype(tile.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(tile, place)
