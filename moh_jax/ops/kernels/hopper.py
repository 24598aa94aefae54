"""The kernels for NVIDIA Hopper (Pallas Mosaic GPU).

The matrix of logits is cut into tiles of r rows and L keys. Work of the first
two kernels (forward, gradient of the queries) is a tile of rows and a loop over
the tiles of keys that it reads. Work of the third (gradients of keys and
values) is a tile of keys of one key/value head and a loop over the tiles of
rows, of all query heads, that read it. Two warpgroups compute, a third one
copies tiles ahead of them. The softmax is in base 2, which the hardware
computes directly.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block, r rows of a tile, L keys of a tile, P tiles of
rows in all blocks, J tiles of keys.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.basics import HALF
from moh_jax.ops.kernels.attention import (
  LOG2_E,
  Arrays,
  BlockSizes,
  Kernels,
  Problem,
  Tile,
  keys_of_rows,
  rows_of_keys,
)
from moh_jax.ops.kernels.hopper_program import (
  MATRIX,
  PART,
  PER_COLUMN,
  PER_ROW,
  Launch,
  Masks,
  Part,
  alternating,
  column,
  hide,
  row,
)
from moh_jax.ops.target import Target

_HEAD_DIMS = 64, 96, 128, 256
# CUDA whose ptxas, as JAX says, miscompiles causal attention of Pallas'
# Mosaic GPU: 12.8.0 to 12.9.0. 12.9.1 has the same number.
_MISCOMPILING_CUDA = range(12080, 12091)


class Hopper(Kernels):
  """The kernels for NVIDIA Hopper."""

  tiles: ClassVar = {
    2: {
      64: BlockSizes.of((128, 128, 3), (128, 128, 2), (128, 128, 2)),
      128: BlockSizes.of((128, 128, 2), (128, 64, 2), (64, 128, 2)),
      256: BlockSizes.of((128, 64, 2), (128, 64, 1), (64, 64, 2)),
    }
  }

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """See `Kernels.unable`."""
    if device.compute != 9:
      return f"an NVIDIA Hopper GPU, this is a {device.kind}"
    if device.cuda in _MISCOMPILING_CUDA:
      return f"a CUDA that compiles its kernels well, not {device.cuda}"
    if dtype in HALF and head_dim in _HEAD_DIMS:
      return ""
    return (
      f"{' or '.join(HALF)} and a head_dim in {_HEAD_DIMS}, not {dtype} and "
      f"{head_dim}"
    )

  def run(
    self, name: str, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.run`."""
    if name == "dkv":
      return KeyLaunch(problem, tile, 2).compute(rows, keys)
    launch = RowLaunch(problem, tile, tile.rows // PART)
    kernel = {"forward": _forward_kernel, "dq": _query_gradient_kernel}[name]
    return launch.compute(kernel, rows, keys)


class RowLaunch(Launch):
  """Launch of a kernel whose pieces of work are tiles of rows."""

  def table(self) -> tuple[jax.Array, jax.Array]:
    """All work [P, 7] int32, a `Work` per row, and how much is used, [1]."""
    problem = self.problem
    blocks, per_block = problem.blocks, problem.rows // self.rows
    tile = jnp.arange(problem.num_blocks * per_block, dtype=jnp.int32)
    head = blocks.head[tile // per_block]
    if self.run == 2:
      first, end = (blocks.first[x] * per_block for x in (head, head + 1))
      tile = jnp.where(tile < end, alternating(first, tile, end), tile)
    place = head // problem.kv_heads, head % problem.kv_heads
    bounds = (x[tile] for x in keys_of_rows(problem, self.rows, self.keys))
    table = jnp.stack([tile, *place, *bounds], -1)
    return table, blocks.first[-1:] * per_block

  def masked(self, part: Part) -> Callable | None:
    """See `Launch.masked`; loads the masks of the part's rows."""
    problem = self.problem
    if problem.visible.everything and problem.keys % self.keys == 0:
      return None
    by_row = jax.tree.map(
      lambda x: self.load(x.at[_own_rows(part)], PER_ROW), part.masks[:2]
    )

    def masked(j: jax.Array, logits: jax.Array) -> jax.Array:
      place = part.work.batch, pl.ds(j * self.keys, self.keys)
      by_key = jax.tree.map(
        lambda x: self.load(x.at[place], PER_COLUMN), part.masks.key_codes
      )
      own = Masks(*by_row, by_key)
      return hide(self, logits, own, j * self.keys, rows_axis=0)

    return masked

  def compute(self, kernel: Callable, rows: Arrays, keys: Arrays) -> Arrays:
    """Launches a kernel that adds to rows."""
    # A piece holds its tile of queries and of the output's gradient.
    held, others = rows[::3], rows[1:3]
    slots = 2 if self.problem.head_dim <= 128 else 1
    streams = [(x,) for x in keys]
    outputs = self.problem.row_outputs
    return self.run_kernel(
      kernel, self.table(), held, slots, streams, others, outputs
    )


def _own_rows(part: Part) -> pl.Slice:
  """Where the rows of a part lie."""
  return pl.ds(part.work.tile * part.launch.rows + part.start, PART)


def _forward_kernel(
  part: Part, tiles: tuple, others: tuple, outputs: tuple
) -> tuple[jax.Array, Callable]:
  launch, (out_ref, sum_ref) = part.launch, outputs
  keys, values = part.rings
  q, span = part.own(tiles[0]), _own_rows(part)

  def step(turn: jax.Array, hide: Callable, carry: tuple) -> tuple:
    acc, highest, total = carry
    [k] = keys.take(turn)
    logits = launch.across(q, k, part.switch)
    keys.release(turn)
    logits = hide(logits)
    new = jnp.maximum(highest, logits.max(1))
    # Rows that have seen no key: any finite shift keeps exp2(-inf) = 0.
    shift = jnp.where(new == -jnp.inf, 0.0, new) * launch.problem.log2_scale
    decay = jnp.exp2(highest * launch.problem.log2_scale - shift)
    weights = launch.weights(logits, row(shift, logits.shape))
    total = total * decay + weights.sum(1)
    acc = acc * row(decay, acc.shape)
    weights = weights.astype(q.dtype)
    part.switch()
    [v] = values.take(turn)
    acc = launch.add_product(acc, weights, v)
    values.release(turn)
    return acc, new, total

  zeros = launch.full(0.0, launch.problem.head_dim)
  start = zeros, launch.full(-jnp.inf), launch.full(0.0)
  # Two consumers take turns at the tensor cores: one computes products while
  # the other one, half a turn behind, computes exponentials. In each piece of
  # work anew: the one ahead would otherwise wait for memory that the other one
  # frees only when its turn comes.
  pl.when(part.consumer == 1)(part.switch)
  done, (acc, highest, total) = part.over_tiles(step, start)
  pl.when(part.consumer == 0)(part.switch)  # as many switches for both

  def store() -> None:
    sees_keys = total > 0
    norm = jnp.where(sees_keys, total, 1.0)
    _store(acc * row(1 / norm, acc.shape), q, out_ref.at[span])
    shift = jnp.where(sees_keys, highest, 0.0) * launch.problem.log2_scale
    sum_ref[span] = shift + jnp.log(norm) * LOG2_E
    _wait_until_read()

  return done, store


def _query_gradient_kernel(
  part: Part, tiles: tuple, others: tuple, outputs: tuple
) -> tuple[jax.Array, Callable]:
  launch, span = part.launch, _own_rows(part)
  (out_ref, sums_ref), (dq_ref, inner_ref) = others, outputs
  keys, values = part.rings
  q, grad = map(part.own, tiles)
  log_sums = launch.load(sums_ref.at[span], PER_ROW)
  out = launch.load(out_ref.at[span], MATRIX).astype(jnp.float32)
  inner = (out * grad[...].astype(jnp.float32)).sum(1)
  inner_ref[span] = inner

  def step(turn: jax.Array, hide: Callable, dq: jax.Array) -> jax.Array:
    [k], [v] = keys.take(turn), values.take(turn)

    def weigh(products: jax.Array) -> jax.Array:
      logits = hide(products)
      return launch.weights(logits, row(log_sums, logits.shape))

    weights, dweights = launch.across_both((q, k), weigh, (grad, v))
    values.release(turn)
    dlogits = weights * (dweights - row(inner, weights.shape))
    dq = launch.add_product(dq, dlogits.astype(k.dtype), k)
    keys.release(turn)
    return dq

  done, dq = part.over_tiles(step, launch.full(0.0, launch.problem.head_dim))

  def store() -> None:
    _store(dq * launch.problem.scale, q, dq_ref.at[span])
    _wait_until_read()

  return done, store


class KeyLaunch(Launch):
  """Launch of the kernel whose pieces of work are tiles of keys."""

  @property
  def shares_keys(self) -> bool:
    """Whether each consumer computes one gradient of all keys of the tile.

    The registers of one do not hold both gradients of a large head dim.
    """
    return self.keys == PART

  def table(self) -> jax.Array:
    """All work [B * K * J, 7] int32, a `Work` per row."""
    problem = self.problem
    shape = problem.batch, problem.kv_heads, self.key_tiles
    batch, head, tile = jnp.indices(shape, jnp.int32)
    if self.run == 2:
      tile = alternating(0, tile, self.key_tiles)
    bounds = (
      x.reshape(shape)[batch, head, tile]
      for x in rows_of_keys(problem, self.rows, self.keys)
    )
    return jnp.stack([tile, batch, head, *bounds], -1).reshape(-1, 7)

  def masked(self, part: Part) -> Callable | None:
    """See `Launch.masked`."""
    # Gradients of keys beyond the last are not stored, so nothing hides them.
    if self.problem.visible.everything:
      return None
    work, masks = part.work, part.masks

    def masked(i: jax.Array, logits: jax.Array) -> jax.Array:
      span = pl.ds(i * self.rows, self.rows)
      by_row = jax.tree.map(
        lambda x: self.load(x.at[span], PER_COLUMN), masks[:2]
      )
      first = work.tile * self.keys + part.start
      by_key = jax.tree.map(
        lambda x: self.load(x.at[work.batch].at[pl.ds(first, PART)], PER_ROW),
        masks.key_codes,
      )
      own = Masks(*by_row, by_key)
      return hide(self, logits, own, first, rows_axis=1)

    return masked

  def compute(self, rows: Arrays, keys: Arrays) -> Arrays:
    """Launches the kernel; its outputs are like the keys and values."""
    # Copies leave out what is beyond an array's end; the interpreter's do not.
    more = self.key_tiles * self.keys - self.problem.keys
    pad = (0, more if self.problem.interpret else 0)
    outputs = jax.eval_shape(
      lambda: tuple(jnp.pad(x, ((0, 0), pad, (0, 0), (0, 0))) for x in keys)
    )
    pieces = self.table(), None
    results = self.run_kernel(
      _key_gradients_kernel, pieces, keys, 1, [rows], (), outputs
    )
    return tuple(x[:, : self.problem.keys] for x in results)


def _key_gradients_kernel(
  part: Part, tiles: tuple, others: tuple, outputs: tuple
) -> tuple[jax.Array, Callable]:
  launch, [row_ring] = part.launch, part.rings
  scale, dim = launch.problem.scale, launch.problem.head_dim
  k, v = map(part.own, tiles)

  # Logits are transposed, [PART, r]: the weights are then left operands of both
  # products, as registers can be. One product follows the other: there are not
  # enough registers for two.
  def weigh(hide: Callable, q: Any, sums_ref: Any) -> jax.Array:
    logits = hide(launch.across(k, q))
    log_sums = column(launch.load(sums_ref, PER_COLUMN), logits.shape)
    return launch.weights(logits, log_sums)

  def add_dk(dk: jax.Array, weights: jax.Array, rows: tuple) -> jax.Array:
    q, _, inner_ref, grad = rows
    inner = column(launch.load(inner_ref, PER_COLUMN), weights.shape)
    dlogits = weights * launch.add_across(-inner, v, grad)
    return launch.add_product(dk, dlogits.astype(q.dtype), q)

  def add_dv(dv: jax.Array, weights: jax.Array, rows: tuple) -> jax.Array:
    grad = rows[3]
    return launch.add_product(dv, weights.astype(grad.dtype), grad)

  def step(turn: jax.Array, hide: Callable, sums: Any) -> Any:
    rows = row_ring.take(turn)
    weights = weigh(hide, *rows[:2])
    if launch.shares_keys:
      sums = lax.cond(
        part.consumer == 0,
        lambda x: add_dk(x, weights, rows),
        lambda x: add_dv(x, weights, rows),
        sums,
      )
    else:
      dk, dv = sums
      dv = add_dv(dv, weights, rows)
      sums = add_dk(dk, weights, rows), dv
    row_ring.release(turn)
    return sums

  def place(x: Any) -> Any:
    """The part's keys of an array [B, M, K, D] in global memory."""
    first = part.work.tile * launch.keys + part.start
    return x.at[part.work.batch, pl.ds(first, PART), part.work.head]

  zeros, (dk_place, dv_place) = launch.full(0.0, dim), map(place, outputs)
  start = zeros if launch.shares_keys else (zeros, zeros)
  done, sums = part.over_tiles(step, start)

  def store() -> None:
    if launch.shares_keys:
      part.switch()  # the other one may still read the keys
      pl.when(part.consumer == 0)(lambda: _store(sums * scale, k, dk_place))
      pl.when(part.consumer == 1)(lambda: _store(sums, v, dv_place))
    else:
      _store(sums[0] * scale, k, dk_place)
      _store(sums[1], v, dv_place)
    _wait_until_read()

  return done, store


def _store(values: jax.Array, tile: Any, place: Any) -> None:
  """Starts to write a matrix to global memory, through a tile not needed."""
  tile[...] = values.astype(tile.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(tile, place)


def _wait_until_read() -> None:
  """Waits until the tiles of `_store` may be filled anew; writes go on."""
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
