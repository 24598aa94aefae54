"""How the GPU kernels are launched: grids, arguments and loop bounds.

Shapes as in `gpu`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels import triton_backend
from moh_jax.ops.kernels.problem import Argument, like
from moh_jax.ops.kernels.triton_program import Program
from moh_jax.ops.kernels.triton_tables import keys_of_rows, rows_of_keys


@dataclasses.dataclass(frozen=True)
class Plan(Program):
  """Launch of one kernel of one call; attributes as those of `Program`."""

  def own_rows(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes each program its tile of rows, of [T * R, D] or [T * R]."""
    block = (self.rows, self.width)[: x.ndim]
    index = (lambda i: (self.row_tile(i), 0)) if x.ndim > 1 else self.row_tile
    return Argument(x, pl.BlockSpec(block, index))

  def all_rows(self, x: jax.Array) -> Argument:
    """Passes each program all rows, [X, D] or [X]."""
    return self._whole(x, (x.shape[0], self.width)[: x.ndim])

  def keys_or_values(self, x: jax.Array | jax.ShapeDtypeStruct) -> Argument:
    """Passes each program all keys or values, [B, M, K, D]."""
    batch, _, heads, _ = x.shape
    return self._whole(x, (batch, self._padded_keys, heads, self.width))

  def key_masks(self) -> tuple:
    """The key mask and each key's segment, [B, M] or None."""
    block = (self.problem.batch, self._padded_keys)
    visible = self.problem.visible
    masks = visible.key_mask, visible.segments
    return jax.tree.map(lambda x: self._whole(x, block), masks)

  def row_table(self) -> tuple:
    """Each block's head, each head's first block, and the loops' bounds.

    The bounds are those of `keys_of_rows`; None if nothing is hidden.
    """
    blocks, bounds = self.problem.blocks, None
    if not self.problem.visible.everything:
      bounds = keys_of_rows(self.problem, self.rows, self.keys)
    return blocks.head, blocks.first, bounds

  def key_table(self) -> tuple:
    """The first block of each head [B * H + 1], and the loops' bounds.

    The bounds are those of `rows_of_keys`; None if nothing is hidden.
    """
    bounds = None
    if not self.problem.visible.everything:
      bounds = rows_of_keys(self.problem, self.rows, self.keys)
    return self.problem.blocks.first, bounds

  def call_by_rows(
    self, kernel: Callable, rows: Any, keys: tuple, outputs: tuple
  ) -> tuple:
    """Launches a kernel with one program per tile of rows.

    Args:
      kernel: gets `row_table`, then the inputs, the masks and the outputs.
      rows: arrays [T * R, D] or [T * R], of which a program gets its tile, or
        arguments.
      keys: keys and values.
      outputs: shapes of rows.
    """
    inputs = self._inputs(self.row_table(), rows, keys, self.own_rows)
    outputs = jax.tree.map(self.own_rows, outputs)
    return self._call(kernel, (self.row_tiles,), inputs, outputs)

  def call_by_keys(self, kernel: Callable, rows: Any, keys: tuple) -> tuple:
    """Launches a kernel with one program per tile of keys of each head.

    Args:
      kernel: gets `key_table`, then the inputs, the masks and the outputs.
      rows: arrays [T * R, D] or [T * R].
      keys: keys and values; the outputs have their shapes and dtypes.
    """
    inputs = self._inputs(self.key_table(), rows, keys, self.all_rows)
    outputs = tuple(map(self.keys_or_values, map(like, keys)))
    grid = self.key_tiles, self.problem.batch * self.problem.kv_heads
    return self._call(kernel, grid, inputs, outputs)

  def _inputs(
    self, table: tuple, rows: Any, keys: tuple, argument: Callable
  ) -> tuple:
    """Arguments of a kernel; `argument` makes those with one entry per row."""
    return (
      jax.tree.map(lambda x: self._whole(x, x.shape), table),
      tuple(x if isinstance(x, Argument) else argument(x) for x in rows),
      jax.tree.map(self.keys_or_values, keys),
      (jax.tree.map(argument, self.problem.row_masks()), self.key_masks()),
    )

  def _call(
    self, kernel: Callable, grid: tuple[int, ...], inputs: Any, outputs: Any
  ) -> Any:
    """Launches a kernel on tuples (of tuples) of `Argument`."""
    in_specs, out_specs = (
      jax.tree.map(lambda x: x.spec, tree) for tree in (inputs, outputs)
    )
    launch = triton_backend.launch(
      functools.partial(kernel, plan=self),
      self.tile,
      out_shape=jax.tree.map(lambda x: x.array, outputs),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      interpret=self.problem.interpret,
      name="moh" + kernel.__name__,
    )
    return launch(*jax.tree.map(lambda x: x.array, inputs))

  @property
  def _padded_keys(self) -> int:
    return self.key_tiles * self.keys

  def _whole(self, x: Any, block: tuple[int, ...]) -> Argument:
    return Argument(x, pl.BlockSpec(block, lambda *_: (0,) * len(block)))
