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

_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_DIMS = 64, 96, 128, 256


def forward(problem: Problem, q: jax.Array, keys: Arrays, tile: Tile) -> Arrays:
  """See `Kernels.forward`."""
  return RowLaunch(problem, tile, tile.rows // PART).run_kernel(
    _forward_kernel, (q,), (), keys, problem.outputs(q, keys[1])
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
    acc = launch.add_product(acc, weights, v)
    part.values.release(turn)
    return acc, new, total

  zeros = launch.zeros(launch.problem.head_dim)
  start = zeros, launch.per_row(-jnp.inf), launch.per_row(0.0)
  # In each piece of work anew: the one ahead would otherwise wait for memory
  # that the other one frees only when its turn comes.
  part.turns.start(part.consumer)
  acc, highest, total = part.over_keys(step, start)
  part.turns.stop(part.consumer)
  sees_keys = total > 0
  total = jnp.where(sees_keys, total, 1.0)
  _store(acc * row(1 / total, acc.shape), q, out_ref.at[span])
  shift = jnp.where(sees_keys, highest, 0.0) * launch.exponent_scale
  sum_ref[span] = shift + jnp.log(total) * LOG2_E
  plgpu.wait_smem_to_gmem(0)


def _query_gradient_kernel(
  part: RowPart, tiles: tuple, others: tuple, outputs: tuple
) -> None:
  launch, (out_ref, sums_ref), (dq_ref, inner_ref) = (
    part.launch,
    others,
    outputs,
  )
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
    dq = launch.add_product(dq, dlogits.astype(k.dtype), k)
    part.keys.release(turn)
    return dq

  dq = part.over_keys(step, launch.zeros(launch.problem.head_dim))
  _store(dq * launch.problem.scale, q, dq_ref.at[span])
  plgpu.wait_smem_to_gmem(0)


def _key_gradients_kernel(
  part: KeyPart, tiles: tuple, outputs: tuple
) -> jax.Array:
  launch = part.launch
  scale, dim = launch.problem.scale, launch.problem.head_dim
  k, v = map(part.own, tiles)

  # Logits are transposed, [PART, r]: the weights are then left operands of both
  # products, as registers can be. One product follows the other: there are not
  # enough registers for two.
  def weigh(hide: Callable, q: Any, sums_ref: Any) -> jax.Array:
    logits = hide(launch.logits(launch.across(k, q)))
    log_sums = column(launch.load_per_column(sums_ref), logits.shape)
    return launch.weights(logits, log_sums)

  def add_dk(dk: jax.Array, weights: jax.Array, rows: tuple) -> jax.Array:
    q, _, inner_ref, grad = rows
    inner = column(launch.load_per_column(inner_ref), weights.shape)
    dlogits = weights * launch.add_across(-inner, v, grad)
    return launch.add_product(dk, dlogits.astype(q.dtype), q)

  def add_dv(dv: jax.Array, weights: jax.Array, rows: tuple) -> jax.Array:
    grad = rows[3]
    return launch.add_product(dv, weights.astype(grad.dtype), grad)

  def step_both(turn: jax.Array, hide: Callable, carry: tuple) -> tuple:
    dk, dv = carry
    rows = part.rows.take(turn)
    weights = weigh(hide, *rows[:2])
    dv = add_dv(dv, weights, rows)
    dk = add_dk(dk, weights, rows)
    part.rows.release(turn)
    return dk, dv

  def step_one(turn: jax.Array, hide: Callable, total: jax.Array) -> jax.Array:
    rows = part.rows.take(turn)
    weights = weigh(hide, *rows[:2])
    total = jax.lax.cond(
      part.consumer == 0,
      lambda x: add_dk(x, weights, rows),
      lambda x: add_dv(x, weights, rows),
      total,
    )
    part.rows.release(turn)
    return total

  zeros, (dk_place, dv_place) = launch.zeros(dim), map(part.place, outputs)
  if launch.shares_keys:
    done, total = part.over_rows(step_one, zeros)
    part.turns.switch()  # the other one may still read the keys

    @pl.when(part.consumer == 0)
    def _() -> None:
      _store(total * scale, k, dk_place)

    @pl.when(part.consumer == 1)
    def _() -> None:
      _store(total, v, dv_place)

  else:
    done, (dk, dv) = part.over_rows(step_both, (zeros, zeros))
    _store(dk * scale, k, dk_place)
    _store(dv, v, dv_place)
  plgpu.wait_smem_to_gmem(0)
  return done


def _store(values: jax.Array, tile: Any, place: Any) -> None:
  """Starts to write a matrix to global memory, through a tile not needed."""
  tile[...] = values.astype(tile.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(tile, place)


def supports(dtype: jax.typing.DTypeLike, head_dim: int) -> bool:
  """Whether the kernels take queries, keys and values like these.

  Args:
    dtype: of queries, keys and values, which have to be the same.
    head_dim: D.
  """
  return jnp.dtype(dtype) in _DTYPES and head_dim in _HEAD_DIMS


def check(dtype: jnp.dtype, value_dtype: jnp.dtype, head_dim: int) -> None:
  """Checks that the kernels take a call.

  Args:
    dtype: of the products of queries and keys.
    value_dtype: of the values.
    head_dim: D.

  Raises:
    ValueError: they do not.
  """
  if dtype != value_dtype or not supports(dtype, head_dim):
    raise ValueError(
      f"backend='mosaic_gpu' needs queries, keys and values of one dtype, "
      f"{' or '.join(jnp.dtype(x).name for x in _DTYPES)}, and a head_dim in "
      f"{_HEAD_DIMS}, not {dtype.name}, {value_dtype.name} (values) and "
      f"{head_dim}"
    )


def check_rows(rows: int) -> None:
  """See `Kernels.check_rows`."""
  if rows not in (PART, 2 * PART):
    raise ValueError(
      f"rows={rows} of a block must be {PART} or {2 * PART} on Hopper"
    )
