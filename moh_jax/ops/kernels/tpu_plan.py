"""How the TPU kernels are launched, and what their steps load.

The steps of a grid run one after another, each a visit of `tpu_visits`. What a
step loads is fetched while the step before it computes, and stays where the
next step loads the same: the keys of a head are fetched once for all of its
rows if they fit the memory of a core, and rows once for all heads and chunks of
keys that they meet.

Shapes as in `tpu`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moh_jax.ops.kernels.problem import Argument, Problem
from moh_jax.ops.kernels.tpu_visits import Cut, Tables, tables, visit_of_step
from moh_jax.ops.lanes import LANES
from moh_jax.ops.target import target

_MIB = 1 << 20
# By `Target.name`: VMEM of a core and the cores of a device, as
# `pltpu.get_tpu_info` says. Others, and the interpreter, get the least.
_CHIPS = {
  "TPU v4": (16 * _MIB, 2),
  "TPU v5e": (128 * _MIB, 1),
  "TPU v5p": (64 * _MIB, 2),
  "TPU v6e": (128 * _MIB, 1),
  "TPU7x": (64 * _MIB, 1),
}
_LEAST = 16 * _MIB, 1
# What a step should do at least: starting one costs time whatever it does.
_STEP_FLOPS = 1e9
_STEP_ROWS = 512
_STEPS = 8  # of a call at least: only the first one's loads are waited for


@dataclasses.dataclass(frozen=True)
class Plan:
  """Launch of one kernel of one call, and what its steps do.

  Attributes:
    problem: the call.
    max_keys: largest L allowed: M, at most LANES, or a multiple of LANES.
    keys_first: whether the kernel adds to keys, visiting all of their rows one
      after another, instead of to rows.
  """

  problem: Problem
  max_keys: int
  keys_first: bool

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a tile, L: tiles of nearly equal size, so few keys are padding.

    For instance, 1,100 keys in tiles of at most 1,024 are two tiles of 640.
    """
    tiles = max(pl.cdiv(self.problem.keys, self.max_keys), self._parts)
    if tiles == 1 and self.problem.keys == self.max_keys:
      return self.max_keys  # a single tile may have any size
    unit = min(LANES, self.max_keys)
    return pl.cdiv(pl.cdiv(self.problem.keys, unit), tiles) * unit

  @property
  def _parts(self) -> int:
    """Into how many parts the keys of a head are cut for all cores to add."""
    cores = _CHIPS.get(target().name, _LEAST)[1]
    heads = self.problem.batch * self.problem.kv_heads
    return pl.cdiv(cores, heads) if self.keys_first else 1

  @functools.cached_property
  def cut(self) -> Cut:
    """The sizes of what a step loads, such that it fits the VMEM."""
    memory, cores = _CHIPS.get(target().name, _LEAST)
    problem = self.problem
    rows, tiles = problem.rows, pl.cdiv(problem.keys, self.keys)
    flops = _STEP_FLOPS * (2 if problem.visible.causal else 1)
    most = min(
      problem.num_blocks // _STEPS,
      memory // 4 // (rows * self._bytes_per_row),
      pl.cdiv(int(flops / (4 * problem.keys * problem.head_dim)), rows),
    )
    window = max(most, pl.cdiv(_STEP_ROWS, rows), 1)
    window = min(window, pl.cdiv(problem.num_blocks, cores))
    # A single block of rows gains nothing from keys that stay.
    once = problem.queries * problem.group <= rows
    chunk = memory // 2 // (self.keys * self._bytes_per_key)
    if self._parts > 1:  # more of them, since causal ones differ in work
      chunk = min(chunk, tiles // (2 * self._parts))
    chunk = 1 if once else max(min(tiles, chunk), 1)
    chunk = pl.cdiv(tiles, pl.cdiv(tiles, chunk))
    heads, all_heads = 1, problem.batch * problem.kv_heads
    if chunk == tiles and not once:
      blocks = pl.cdiv(problem.num_blocks, all_heads)
      fit = memory // 2 // (tiles * self.keys * self._bytes_per_key)
      heads = max(min(window // blocks, fit, all_heads // cores), 1)
      heads = max(x for x in range(1, heads + 1) if problem.kv_heads % x == 0)
    places = pl.cdiv(problem.num_blocks, window)
    if self.keys_first:
      places = all_heads // heads * pl.cdiv(tiles, chunk)
    return Cut(self.keys, tiles, chunk, window, heads, min(cores, places))

  @property
  def _bytes_per_row(self) -> int:
    """VMEM for one row: up to four arrays, each loaded a step ahead."""
    return 8 * _padded(self.problem.head_dim) * self.problem.dtype.itemsize

  @property
  def _bytes_per_key(self) -> int:
    """VMEM for one key and its value, loaded ahead, and what is added to it."""
    numbers = 2 * _padded(self.problem.head_dim)
    size = 2 * self.problem.dtype.itemsize
    if not self.keys_first:
      return numbers * size
    # Gradients as results and as float32 sums; masks as columns.
    return numbers * (2 * size + 4) + 8 * LANES * self.problem.masks_by_value

  def _vmem_limit(self) -> int:
    """VMEM that the compiler may use; XLA keeps other arrays in the rest."""
    memory, _ = _CHIPS.get(target().name, _LEAST)
    rows, cut = self.problem.rows, self.cut
    keys = cut.heads * cut.chunk * self.keys
    loaded = keys * self._bytes_per_key
    loaded += cut.window * rows * self._bytes_per_row
    # Logits, weights, and what else is of the size of a tile, and scratch.
    tile = rows * (self.keys + 4 * _padded(self.problem.head_dim))
    return min(memory // 8 * 7, loaded + 24 * tile + 8 * _MIB)

  # What is passed to a kernel.

  def rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step its window of rows.

    Args:
      x: [T * R, D], loaded as [blocks, R, D], or [T * R], loaded as
        [blocks, 1, R].
    """
    inner = (1, self.problem.rows, *x.shape[1:])[-2:]
    shape = (self.problem.num_blocks, *inner)
    output = isinstance(x, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if output else x.reshape(shape)

    def index(core, step, *lists):
      lists = Tables(*lists)
      return lists.window[visit_of_step(core, step, lists)], 0, 0

    return Argument(x, pl.BlockSpec((self.cut.window, *inner), index))

  def keys_or_values(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes a step the keys or values of a unit that are in memory.

    XLA writes keys in this order as it computes them where D fills the vector
    lanes; [B, M, K * D], which needs no other order, would be copied.

    Args:
      x: [B, M, K, D], loaded as [heads, keys, D].
    """
    batch, keys, kv_heads, dim = x.shape
    padded = self.cut.tiles * self.keys
    if isinstance(x, jax.ShapeDtypeStruct):
      x = jax.ShapeDtypeStruct((batch * kv_heads, padded, dim), x.dtype)
    else:
      x = x.swapaxes(1, 2).reshape(batch * kv_heads, keys, dim)
      if padded > keys:
        x = jnp.pad(x, ((0, 0), (0, padded - keys), (0, 0)))

    def index(core, step, *lists):
      lists = Tables(*lists)
      visit = visit_of_step(core, step, lists)
      return lists.unit[visit], lists.chunk[visit], 0

    block = self.cut.heads, self.cut.chunk * self.keys, dim
    return Argument(x, pl.BlockSpec(block, index))

  def key_masks(self) -> tuple:
    """The key mask and each key's segment, [1, 1, keys] int32 or None."""
    cut = self.cut
    fill = cut.tiles * cut.keys - self.problem.keys
    each = self.problem.kv_heads // cut.heads

    def index(core, step, *lists):
      lists = Tables(*lists)
      visit = visit_of_step(core, step, lists)
      return lax.div(lists.unit[visit], each), 0, lists.chunk[visit]

    spec = pl.BlockSpec((1, 1, cut.chunk * cut.keys), index)

    def argument(x: jax.Array) -> Argument:
      x = jnp.pad(x.astype(jnp.int32), ((0, 0), (0, fill)))
      return Argument(x[:, None], spec)

    visible = self.problem.visible
    return jax.tree.map(argument, (visible.key_mask, visible.segments))

  def call(
    self,
    kernel: Callable,
    rows: Any,
    keys: tuple,
    outputs: tuple,
    scratch: Sequence[tuple[int, ...]],
  ) -> tuple[Any, jax.Array]:
    """Launches a kernel.

    Args:
      kernel: gets the tables, rows, keys, values, row masks, key masks, the
        outputs, the scratch arrays, and last one int32 scratch array for each
        mask of the side that it adds to (rows, or keys if `keys_first`), in
        which it stores the mask as columns, [tiles, L or R, LANES].
      rows: arrays [T * R, D] or [T * R].
      keys: keys and values.
      outputs: shapes of arrays like the rows, or like the keys if `keys_first`.
      scratch: shapes of float32 arrays that live through all steps.

    Returns:
      The outputs as `rows` or `keys_or_values` shape them, and which chunks of
      keys were visited, [U, chunks] bool.
    """
    lists, visited = tables(self.problem, self.cut, keys_first=self.keys_first)
    row_masks = jax.tree.map(self.rows, self.problem.row_masks())
    key_masks = self.key_masks()
    columns, shape = row_masks, (1, self.problem.rows, LANES)
    if self.keys_first:
      columns, shape = key_masks, (self.cut.chunk, self.keys, LANES)
    columns = jax.tree.map(lambda x: pltpu.VMEM(shape, jnp.int32), columns)
    rows = jax.tree.map(self.rows, rows)
    inputs = rows, *map(self.keys_or_values, keys), row_masks, key_masks
    output = self.keys_or_values if self.keys_first else self.rows
    outputs = tuple(map(output, outputs))
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    arrays = [pltpu.VMEM(shape, jnp.float32) for shape in scratch]

    def run(*refs: Any) -> None:
      kernel(Tables(*refs[: len(lists)]), *refs[len(lists) :], plan=self)

    launch = pl.pallas_call(
      run,
      out_shape=jax.tree.map(lambda x: x.array, outputs),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(lists),
        grid=(self.cut.cores, jnp.diff(lists.first).max()),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[*arrays, columns],
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=self._vmem_limit(),
      ),
      interpret=self.problem.interpret,
      name="moh" + kernel.__name__,
    )
    results = launch(*lists, *jax.tree.map(lambda x: x.array, inputs))
    return results, visited


def _padded(dim: int) -> int:
  """Lanes that a row of an array takes in VMEM."""
  return pl.cdiv(dim, LANES) * LANES
