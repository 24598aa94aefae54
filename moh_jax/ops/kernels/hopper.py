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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.basics import HALF
from moh_jax.ops.kernels.hopper_program import (
  PART,
  Launch,
  Masks,
  Ring,
  Turns,
  alternating,
  column,
  hide,
  loop,
  masks,
  row,
)
from moh_jax.ops.kernels.problem import (
  LOG2_E,
  Arrays,
  BlockSizes,
  Kernels,
  Problem,
  Ranges,
  Tile,
  keys_of_rows,
  rows_of_keys,
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
      64: BlockSizes.of((128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 4, 2)),
      128: BlockSizes.of((128, 128, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2)),
      256: BlockSizes.of((128, 64, 4, 2), (128, 64, 4, 1), (64, 64, 4, 2)),
    }
  }

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """See `Kernels.unable`."""
    if not device.is_hopper:
      return f"an NVIDIA Hopper GPU, this is a {device.kind}"
    if device.cuda in _MISCOMPILING_CUDA:
      return f"a CUDA that compiles its kernels well, not {device.cuda}"
    return _lacks(dtype, dtype, head_dim)

  def check(self, sizes: BlockSizes) -> None:
    """See `Kernels.check`."""
    if sizes.rows not in (PART, 2 * PART):
      raise ValueError(
        f"rows={sizes.rows} of a block must be {PART} or {2 * PART} on Hopper"
      )
    sizes.check_covers()

  def check_dtypes(
    self, dtype: jnp.dtype, value_dtype: jnp.dtype, head_dim: int
  ) -> None:
    """See `Kernels.check_dtypes`."""
    if reason := _lacks(dtype.name, value_dtype.name, head_dim):
      raise ValueError(f"backend='mosaic_gpu' needs {reason}")

  def forward(
    self, problem: Problem, q: jax.Array, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.forward`."""
    return RowLaunch(problem, tile, tile.rows // PART).run_kernel(
      _forward_kernel, (q,), (), keys, problem.outputs(q, keys[1])
    )

  def query_gradient(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.query_gradient`."""
    q, out, log_sums, grad = rows
    return RowLaunch(problem, tile, tile.rows // PART).run_kernel(
      _query_gradient_kernel, (q, grad), (out, log_sums), keys,
      problem.query_gradients(q),
    )  # fmt: skip

  def key_gradients(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """See `Kernels.key_gradients`."""
    return KeyLaunch(problem, tile, 2).run_kernel(
      _key_gradients_kernel, rows, keys
    )


def _lacks(dtype: str, value_dtype: str, head_dim: int) -> str:
  """What queries, keys and values have to be and are not; else empty."""
  if dtype == value_dtype and dtype in HALF and head_dim in _HEAD_DIMS:
    return ""
  return (
    f"queries, keys and values of one dtype, {' or '.join(HALF)}, and a "
    f"head_dim in {_HEAD_DIMS}, not {dtype}, {value_dtype} (values) and "
    f"{head_dim}"
  )


class RowWork(NamedTuple):
  """A tile of rows, its key/value head, and the tiles of keys that it reads.

  Numbers; the last four are those of `Ranges`.
  """

  tile: Any
  batch: Any
  head: Any
  begin: Any
  whole_begin: Any
  whole_end: Any
  end: Any


@dataclasses.dataclass(frozen=True)
class RowPart:
  """A consumer's part of a piece of work.

  Attributes:
    launch: the kernel.
    work: the piece.
    consumer: number of the consumer.
    offset: what turns the index of a tile of keys into its step in the rings.
    masks: references.
    keys: ring of the keys.
    values: ring of the values.
    turns: of the consumers.
  """

  launch: "RowLaunch"
  work: RowWork
  consumer: Any
  offset: Any
  masks: Masks
  keys: Ring
  values: Ring
  turns: Turns

  @property
  def first(self) -> jax.Array:
    """The first row of the part."""
    return self.work.tile * self.launch.rows + self.consumer * PART

  def own(self, tile: Any) -> Any:
    """The part's rows of a tile in shared memory."""
    return tile.at[pl.ds(self.consumer * PART, PART)]

  def over_keys(self, step: Callable, carry: Any) -> Any:
    """Loops over the tiles of keys.

    Args:
      step: (turn, hide, carry) -> carry, where turn is the step in the rings
        and `hide` sets hidden logits [PART, L] to -inf.
      carry: its first value.

    Returns:
      The last carry.
    """
    hidden = self._hidden()

    def visit(j: jax.Array, carry: Any) -> Any:
      return step(self.offset + j, functools.partial(hidden, j), carry)

    return loop(self.work.begin, self.work.end, visit, carry)

  def _hidden(self) -> Callable:
    """Loads the masks of the rows; returns the function that hides keys."""
    launch, problem = self.launch, self.launch.problem
    if problem.visible.everything and problem.keys % launch.keys == 0:
      return lambda j, logits: logits
    end, codes = (
      None if x is None else launch.load_per_row(x, self.first)
      for x in (self.masks.end, self.masks.row_codes)
    )

    def masked(j: jax.Array, logits: jax.Array) -> jax.Array:
      key_codes = self.masks.key_codes
      if key_codes is not None:
        span = pl.ds(j * launch.keys, launch.keys)
        key_codes = launch.load_per_column(key_codes.at[self.work.batch, span])
      own = Masks(end, codes, key_codes)
      return hide(launch, logits, own, j * launch.keys, rows_axis=0)

    def hidden(j: jax.Array, logits: jax.Array) -> jax.Array:
      whole = j < self.work.whole_end
      if problem.masks_by_value:  # else all rows see the first keys
        whole &= j >= self.work.whole_begin
      return lax.cond(whole, lambda x: x, functools.partial(masked, j), logits)

    return hidden


class RowLaunch(Launch):
  """Launch of a kernel whose pieces of work are tiles of rows."""

  @property
  def row_tiles(self) -> int:
    """Tiles of rows in all blocks, P."""
    return self.problem.num_blocks * self.problem.rows // self.rows

  def table(self) -> tuple[jax.Array, jax.Array]:
    """All work [P, 7] int32, a `RowWork` per row, and how much is used, [1]."""
    problem = self.problem
    blocks, per_block = problem.blocks, problem.rows // self.rows
    tile = jnp.arange(self.row_tiles, dtype=jnp.int32)
    head = blocks.head[tile // per_block]
    if self.run == 2:
      first, end = (blocks.first[x] * per_block for x in (head, head + 1))
      tile = jnp.where(tile < end, alternating(first, tile, end), tile)
    kv_head = head // problem.group
    place = kv_head // problem.kv_heads, kv_head % problem.kv_heads
    bounds = (x[tile] for x in keys_of_rows(problem, self.rows, self.keys))
    table = jnp.stack([tile, *place, *bounds], -1)
    return table, blocks.first[-1:] * per_block

  def run_kernel(
    self,
    kernel: Callable,
    streamed: Arrays,
    others: Arrays,
    keys: Arrays,
    outputs: tuple,
  ) -> Arrays:
    """Launches a kernel.

    Args:
      kernel: called by each consumer for each piece of work with a `RowPart`,
        references to the tiles of the streamed arrays, the other arrays and the
        outputs.
      streamed: arrays [T * R, D] of which tiles are copied to shared memory.
      others: arrays [T * R, D] or [T * R] that stay in global memory.
      keys: keys and values.
      outputs: shapes of the results.
    """

    def consume(
      inputs: tuple, outputs: tuple, rings: tuple, group: Any, turns: Turns
    ) -> None:
      table, used, masks, _, others, _ = inputs
      rows, *key_rings = rings

      def step(m: jax.Array, work: RowWork, done: jax.Array) -> jax.Array:
        offset = done - work.begin
        part = RowPart(self, work, group, offset, masks, *key_rings, turns)
        kernel(part, rows.take(m), others, outputs)
        rows.release(m)
        return done + work.end - work.begin

      self.over_work(table, used[0], RowWork, step)

    def copy(inputs: tuple, rings: tuple) -> None:
      table, used, _, streamed, _, keys = inputs
      rows, *key_rings = rings

      def step(m: jax.Array, work: RowWork, done: jax.Array) -> jax.Array:
        offset = done - work.begin
        span = pl.ds(work.tile * self.rows, self.rows)
        rows.fill(m, *(x.at[span] for x in streamed))

        def copy_tile(j: jax.Array, carry: tuple) -> tuple:
          span = pl.ds(j * self.keys, self.keys)
          for ring, x in zip(key_rings, keys, strict=True):
            ring.fill(offset + j, x.at[work.batch, span, work.head])
          return carry

        loop(work.begin, work.end, copy_tile, ())
        return done + work.end - work.begin

      self.over_work(table, used[0], RowWork, step)

    return self.call(
      "moh" + kernel.__name__,
      consume,
      copy,
      (*self.table(), masks(self), streamed, others, keys),
      outputs,
      (
        self.ring(self.slots, *((self.rows, x) for x in streamed)),
        *(self.ring(self.tile.stages, (self.keys, one_head(x))) for x in keys),
      ),
    )


def _forward_kernel(
  part: RowPart, tiles: tuple, others: tuple, outputs: tuple
) -> None:
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


class KeyWork(NamedTuple):
  """A tile of the keys of a key/value head; numbers."""

  tile: Any
  batch: Any
  head: Any


@dataclasses.dataclass(frozen=True)
class KeyPart:
  """A consumer's part of a piece of work.

  Attributes:
    launch: the kernel.
    work: the piece.
    consumer: number of the consumer.
    offset: steps that were done in the rings before.
    bounds: references to the bounds of `rows_of_keys`.
    masks: references.
    rows: ring of the rows.
    turns: of the consumers.
  """

  launch: "KeyLaunch"
  work: KeyWork
  consumer: Any
  offset: Any
  bounds: Ranges
  masks: Masks
  rows: Ring
  turns: Turns

  @property
  def start(self) -> jax.Array:
    """Where the part's keys begin in a tile."""
    return 0 if self.launch.shares_keys else self.consumer * PART

  def own(self, tile: Any) -> Any:
    """The part's keys of a tile in shared memory."""
    return tile.at[pl.ds(self.start, PART)]

  def place(self, x: Any) -> Any:
    """The part's keys of an array [B, M, K, D] in global memory."""
    first = self.work.tile * self.launch.keys + self.start
    return x.at[self.work.batch, pl.ds(first, PART), self.work.head]

  def over_rows(self, step: Callable, carry: Any) -> tuple[jax.Array, Any]:
    """Loops over the tiles of rows.

    Args:
      step: (turn, hide, carry) -> carry, where turn is the step in the rings
        and `hide` sets hidden logits [PART, r] to -inf.
      carry: its first value.

    Returns:
      The steps that are done in the rings, and the last carry.
    """

    def visit(turn: Any, i: Any, whole: Any, carry: Any) -> Any:
      return step(turn, functools.partial(self._hidden, i, whole), carry)

    return self.launch.over_rows(
      self.work, self.bounds, self.offset, visit, carry
    )

  def _hidden(
    self, i: jax.Array, whole: jax.Array, logits: jax.Array
  ) -> jax.Array:
    """Hides keys from the rows of tile i, unless all see the whole tile."""
    launch = self.launch
    # Gradients of keys beyond the last are not stored, so nothing hides them.
    if launch.problem.visible.everything:
      return logits

    def masked(logits: jax.Array) -> jax.Array:
      span = pl.ds(i * launch.rows, launch.rows)
      by_row = (
        None if x is None else launch.load_per_column(x.at[span])
        for x in (self.masks.end, self.masks.row_codes)
      )
      first = self.work.tile * launch.keys + self.start
      key_codes = self.masks.key_codes
      if key_codes is not None:
        key_codes = key_codes.at[self.work.batch]
        key_codes = launch.load_per_row(key_codes, first)
      own = Masks(*by_row, key_codes)
      return hide(launch, logits, own, first, rows_axis=1)

    return lax.cond(whole, lambda x: x, masked, logits)


class KeyLaunch(Launch):
  """Launch of the kernel whose pieces of work are tiles of keys."""

  @property
  def shares_keys(self) -> bool:
    """Whether each consumer computes one gradient of all keys of the tile.

    The registers of one do not hold both gradients of a large head dim.
    """
    return self.keys == PART

  def table(self) -> jax.Array:
    """All work [B * K * J, 3] int32, a `KeyWork` per row."""
    problem = self.problem
    tile = jnp.arange(self.key_tiles, dtype=jnp.int32)
    if self.run == 2:
      tile = alternating(0, tile, self.key_tiles)
    heads = jnp.arange(problem.batch * problem.kv_heads, dtype=jnp.int32)
    shape = len(heads), len(tile)
    columns = tile, heads[:, None] // problem.kv_heads
    columns = *columns, heads[:, None] % problem.kv_heads
    columns = [jnp.broadcast_to(x, shape).reshape(-1) for x in columns]
    return jnp.stack(columns, -1)

  def over_rows(
    self, work: KeyWork, bounds: Ranges, done: Any, visit: Callable, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Loops over the tiles of rows of the query heads that read a tile of keys.

    Args:
      work: the tile of keys.
      bounds: references.
      done: steps done in the rings before.
      visit: (turn, i, whole, carry) -> carry for tile i of the rows, where turn
        is the step in the rings; `whole` tells that all rows see all keys.
      carry: its first value.

    Returns:
      The steps that are done, and the last carry.
    """
    head = (work.batch * self.problem.kv_heads + work.head) * self.problem.group

    def over_query_head(g: jax.Array, carry: tuple) -> tuple:
      own = Ranges(*(x[head + g, work.tile] for x in bounds))

      def one(i: jax.Array, carry: tuple) -> tuple:
        turn, carry = carry
        whole = i >= own.whole_begin
        if self.problem.masks_by_value:  # else the last rows see all keys
          whole &= i < own.whole_end
        return turn + 1, visit(turn, i, whole, carry)

      return loop(own.begin, own.end, one, carry)

    return loop(0, self.problem.group, over_query_head, (done, carry))

  def run_kernel(self, kernel: Callable, rows: Arrays, keys: Arrays) -> Arrays:
    """Launches the kernel.

    Args:
      kernel: called by each consumer for each piece of work with a `KeyPart`,
        references to the tiles of keys and values, and the outputs; it returns
        the steps that are done in the rings.
      rows: rows [T * R, D] and numbers [T * R].
      keys: keys and values; the outputs have their shapes and dtypes.
    """
    pieces = self.problem.batch * self.problem.kv_heads * self.key_tiles

    def consume(
      inputs: tuple, outputs: tuple, rings: tuple, group: Any, turns: Turns
    ) -> None:
      table, bounds, masks, *_ = inputs
      tiles, row_ring = rings

      def step(m: jax.Array, work: KeyWork, done: jax.Array) -> jax.Array:
        part = KeyPart(self, work, group, done, bounds, masks, row_ring, turns)
        done = kernel(part, tiles.take(m), outputs)
        tiles.release(m)
        return done

      self.over_work(table, pieces, KeyWork, step)

    def copy(inputs: tuple, rings: tuple) -> None:
      table, bounds, _, rows, keys = inputs
      tiles, row_ring = rings

      def step(m: jax.Array, work: KeyWork, done: jax.Array) -> jax.Array:
        span = pl.ds(work.tile * self.keys, self.keys)
        tiles.fill(m, *(x.at[work.batch, span, work.head] for x in keys))

        def copy_tile(turn: Any, i: Any, whole: Any, carry: tuple) -> tuple:
          span = pl.ds(i * self.rows, self.rows)
          row_ring.fill(turn, *(x.at[span] for x in rows))
          return carry

        return self.over_rows(work, bounds, done, copy_tile, ())[0]

      self.over_work(table, pieces, KeyWork, step)

    bounds = rows_of_keys(self.problem, self.rows, self.keys)
    # Copies leave out what is beyond an array's end; the interpreter's do not.
    more = self.key_tiles * self.keys - self.problem.keys
    pad = (0, more if self.problem.interpret else 0)
    outputs = jax.eval_shape(
      lambda: tuple(jnp.pad(x, ((0, 0), pad, (0, 0), (0, 0))) for x in keys)
    )
    results = self.call(
      "moh" + kernel.__name__,
      consume,
      copy,
      (self.table(), bounds, masks(self), rows, keys),
      outputs,
      (
        self.ring(1, *((self.keys, one_head(x)) for x in keys)),
        self.ring(self.tile.stages, *((self.rows, x) for x in rows)),
      ),
    )
    return tuple(x[:, : self.problem.keys] for x in results)


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


def one_head(x: jax.Array) -> jax.ShapeDtypeStruct:
  """Shape of the keys or values [B, M, K, D] of one head, [M, D]."""
  return jax.ShapeDtypeStruct((x.shape[1], x.shape[3]), x.dtype)
