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

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.attention import (
  LOG2_E,
  Arrays,
  BlockSizes,
  Kernels,
  Problem,
  Tile,
  across,
  times,
)
from moh_jax.ops.kernels.tpu_plan import Plan, Step, as_columns, repeat_lanes
from moh_jax.ops.lanes import fill_lanes, heads_in_lanes, in_place
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
    if device.platform not in ("cpu", "tpu"):
      return f"a TPU, this is a {device.platform} ({device.kind})"
    return "bfloat16 or float32, not float16" if dtype == "float16" else ""

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
    tokens, heads, dim = x.shape[1:]
    count = problem.head_dim // dim
    blocks = problem.blocks
    pair = blocks.pair.reshape(blocks.token.shape)
    inside = (pair >= 0)[..., None]
    place, head = jnp.divmod(jnp.maximum(pair, 0), heads)
    batch, token = jnp.divmod(place, tokens)
    index = (batch * (heads // count) + head // count) * tokens + token
    sets = fill_lanes(x, count).swapaxes(1, 2).reshape(-1, problem.head_dim)
    rows = jnp.take(sets, index, axis=0, mode="clip")  # [T, R, W]
    if count > 1:
      wanted = (blocks.head % count)[:, None]
      rows = _moved(rows, (wanted - head % count)[..., None], problem, dim)
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

  def run(
    self, name: str, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.run`."""
    plan = Plan(problem, tile.keys, keys_first=name == "dkv")
    results, visited = plan.call(_KERNELS[name], rows, keys)
    if name != "dkv":
      outputs = problem.row_outputs
      return tuple(x.reshape(y.shape) for x, y in zip(results, outputs))
    cut = plan.cut
    # No step writes the gradients of keys that no row visited.
    visited = jnp.repeat(visited, cut.chunk * cut.keys, axis=1)
    visited = jnp.repeat(visited[:, : problem.keys], cut.heads, axis=0)
    visited = visited.reshape(problem.batch, -1, problem.keys, 1).swapaxes(1, 2)

    def to_key_shape(x: jax.Array) -> jax.Array:
      """Shapes [B * K, J * L, D] as [B, M, K, D]."""
      x = x[:, : problem.keys].reshape(
        problem.batch, -1, problem.keys, problem.head_dim
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


def _forward_kernel(
  step: Step, rows: tuple, keys: tuple, outputs: tuple, sums: tuple
) -> None:
  plan, (q_ref,), (k_ref, v_ref) = step.plan, rows, keys
  (out_ref, sum_ref), (acc_ref, highest_ref, total_ref) = outputs, sums

  def block(i: Any, block: Any, head: Any) -> None:
    at = i if plan.cut.chunks > 1 else 0

    @step.when(step.opens)
    def _() -> None:
      acc_ref[at] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
      highest_ref[at] = jnp.full(highest_ref.shape[1:], -jnp.inf, jnp.float32)
      total_ref[at] = jnp.zeros(total_ref.shape[1:], jnp.float32)

    step.write_columns(0, i)

    def work(j: Any, masked: bool) -> None:
      where = head, step.tile(j), slice(None)
      logits = across(q_ref[i], k_ref[where]) * plan.problem.log2_scale
      logits = step.hide(logits, i, j) if masked else logits
      highest = highest_ref[at]
      new = jnp.maximum(highest, logits.max(1, keepdims=True))
      # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
      shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
      decay = jnp.exp2(highest - shift)
      weights = jnp.exp2(logits - repeat_lanes(shift, plan.keys))
      total_ref[at] = total_ref[at] * decay + weights.sum(1, keepdims=True)
      highest_ref[at] = new
      v = v_ref[where]
      out = times(weights.astype(v.dtype), v)
      acc_ref[at] = acc_ref[at] * repeat_lanes(decay, out.shape[1]) + out

    step.each_tile(block, work)

    @step.when(step.closes)
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
  step: Step, rows: tuple, keys: tuple, outputs: tuple, sums: tuple
) -> None:
  plan, (q_ref, out_ref, sum_ref, grad_ref) = step.plan, rows
  (k_ref, v_ref), (dq_ref, inner_ref) = keys, outputs
  acc_ref, sums_ref, inners_ref = sums

  def block(i: Any, block: Any, head: Any) -> None:
    at = i if plan.cut.chunks > 1 else 0

    @step.when(step.opens)
    def _() -> None:
      acc_ref[at] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
      sums_ref[at] = as_columns(sum_ref[i])
      out, grad = (x[i].astype(jnp.float32) for x in (out_ref, grad_ref))
      inner = (out * grad).sum(1, keepdims=True)
      inner = jnp.broadcast_to(inner, inners_ref.shape[1:])
      inners_ref[at] = inner
      inner_ref[i] = inner.T[:1]

    step.write_columns(0, i)

    def work(j: Any, masked: bool) -> None:
      where = head, step.tile(j), slice(None)
      logits = across(q_ref[i], k_ref[where]) * plan.problem.log2_scale
      logits = step.hide(logits, i, j) if masked else logits
      weights = jnp.exp2(logits - repeat_lanes(sums_ref[at], plan.keys))
      inner = repeat_lanes(inners_ref[at], plan.keys)
      dlogits = weights * (across(grad_ref[i], v_ref[where]) - inner)
      acc_ref[at] += times(dlogits.astype(k_ref.dtype), k_ref[where])

    step.each_tile(block, work)

    @step.when(step.closes)
    def _() -> None:
      dq_ref[i] = (acc_ref[at] * plan.problem.scale).astype(dq_ref.dtype)

  step.each_block(block)


def _key_gradients_kernel(
  step: Step, rows: tuple, keys: tuple, outputs: tuple, sums: tuple
) -> None:
  plan, (q_ref, sum_ref, inner_ref, grad_ref) = step.plan, rows
  (k_ref, v_ref), (dk_ref, dv_ref), (dk_sum, dv_sum) = keys, outputs, sums

  @pl.when(step.opens)
  def _() -> None:
    def clear(head: Any, j: Any) -> None:
      where = head, step.tile(j), slice(None)
      zeros = jnp.zeros((plan.keys, dk_sum.shape[2]), jnp.float32)
      dk_sum[where] = dv_sum[where] = zeros
      step.write_columns(j, 0, step.tile(j))

    step.each_tile_in_memory(clear)

  def block(i: Any, block: Any, head: Any) -> None:
    # Logits are transposed, [L, R]: numbers per row then lie along lanes, as
    # they are loaded.
    def work(j: Any, masked: bool) -> None:
      q, grad = q_ref[i], grad_ref[i]
      where = head, step.tile(j), slice(None)
      logits = across(k_ref[where], q) * plan.problem.log2_scale
      logits = step.hide(logits, i, j) if masked else logits
      weights = jnp.exp2(logits - sum_ref[i])
      dv_sum[where] += times(weights.astype(grad.dtype), grad)
      dlogits = weights * (across(v_ref[where], grad) - inner_ref[i])
      dk_sum[where] += times(dlogits.astype(q.dtype), q)

    step.each_tile(block, work)

  step.each_block(block)

  @pl.when(step.closes)
  def _() -> None:
    def write(head: Any, j: Any) -> None:
      where = head, step.tile(j), slice(None)
      dk_ref[where] = (dk_sum[where] * plan.problem.scale).astype(dk_ref.dtype)
      dv_ref[where] = dv_sum[where].astype(dv_ref.dtype)

    step.each_tile_in_memory(write)


_KERNELS = {
  "forward": _forward_kernel,
  "dq": _query_gradient_kernel,
  "dkv": _key_gradients_kernel,
}
