"""One call of the attention kernels, and what they read of its table.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
tile.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.head_blocks import HeadBlocks
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.visible import Visible

LOG2_E = math.log2(math.e)

# Inputs or outputs of a kernel.
Arrays = tuple[jax.Array, ...]


class KeyRanges(NamedTuple):
  """Ranges of keys: those that may be seen, and those that surely are.

  For instance, causal attention of a tile with tokens 3, 5 and 6: the tile
  reads the keys [0, 7), and all of its rows see the keys [0, 4), so these need
  no mask. All are int32 arrays of one shape.

  Attributes:
    begin: first key that may be seen.
    end: where the keys that may be seen end; at most `begin` if there are none.
    whole_begin: first of the keys that are surely seen.
    whole_end: where these end; at most `whole_begin` if there are none.
  """

  begin: jax.Array
  end: jax.Array
  whole_begin: jax.Array
  whole_end: jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
  """One call of the attention: shapes, masks, the table of active heads.

  On a TPU several narrow heads may be one here, see `tpu_rows`: K and D are
  then those of `attention.arranged_keys`.

  Attributes:
    k_shape: (B, M, K, D), the shape of keys and values.
    dtype: in which queries and keys are multiplied.
    visible: which keys a query sees.
    blocks: the active (token, head) pairs.
    scale: factor of the logits.
    interpret: whether the kernels run in Pallas's interpreter.
  """

  k_shape: tuple[int, ...]
  dtype: jnp.dtype
  visible: Visible
  blocks: HeadBlocks
  scale: float
  interpret: bool

  @property
  def batch(self) -> int:
    """B."""
    return self.k_shape[0]

  @property
  def keys(self) -> int:
    """M."""
    return self.k_shape[1]

  @property
  def kv_heads(self) -> int:
    """K."""
    return self.k_shape[2]

  @property
  def head_dim(self) -> int:
    """D."""
    return self.k_shape[3]

  @property
  def queries(self) -> int:
    """N."""
    return self.blocks.row.shape[1]

  @property
  def group(self) -> int:
    """G."""
    return self.blocks.row.shape[2] // self.kv_heads

  @property
  def num_heads(self) -> int:
    """Query heads of the whole batch, B * H."""
    return len(self.blocks.first) - 1

  @property
  def rows(self) -> int:
    """R."""
    return self.blocks.token.shape[1]

  @property
  def num_blocks(self) -> int:
    """T."""
    return self.blocks.token.shape[0]

  @property
  def masks_by_value(self) -> bool:
    """Whether a key mask or segments hide keys, not only their positions.

    Which tiles need no mask is then unknown before the arrays are read.
    """
    visible = self.visible
    return visible.key_mask is not None or visible.segments is not None

  @property
  def log2_scale(self) -> float:
    """Factor that turns q k^T into logits of a softmax in base 2."""
    return self.scale * LOG2_E

  def to_product_dtype(self, x: jax.Array) -> jax.Array:
    """Widens loaded keys or values where queries have a wider dtype."""
    return x.astype(jnp.promote_types(x.dtype, self.dtype))

  def outputs(self, q: jax.Array, v: jax.Array) -> tuple:
    """Shapes of the forward pass's results, for queries q and values v."""
    shape = self.num_blocks * self.rows, q.shape[-1]
    return jax.ShapeDtypeStruct(shape, v.dtype), self._row_sums()

  def query_gradients(self, q: jax.Array) -> tuple:
    """Shapes of the results of `Kernels.query_gradient`, for rows q."""
    return like(q), self._row_sums()

  def _row_sums(self) -> jax.ShapeDtypeStruct:
    """One float32 per row, [T * R]."""
    return jax.ShapeDtypeStruct((self.num_blocks * self.rows,), jnp.float32)

  def token_ranges(self) -> KeyRanges:
    """The keys that each token sees, [B, N]; ascending in all four numbers."""
    token = jnp.arange(self.queries, dtype=jnp.int32)[None]
    batch = jnp.arange(self.batch, dtype=jnp.int32)[:, None]
    return self._ranges(*jnp.broadcast_arrays(batch, token))

  def row_ranges(self) -> KeyRanges:
    """The keys that each row sees, [T, R]; M in empty rows."""
    token = self.blocks.token
    batch = self.blocks.head[:, None] // (self.group * self.kv_heads)
    empty = token == self.queries
    ranges = self._ranges(batch, jnp.minimum(token, self.queries - 1))
    return KeyRanges(*(jnp.where(empty, self.keys, x) for x in ranges))

  def _ranges(self, batch: jax.Array, token: jax.Array) -> KeyRanges:
    """The keys that some tokens see, in the shape of `token`."""
    keys = self.keys
    begin, end = jnp.zeros_like(token), jnp.full_like(token, keys)
    if self.visible.causal:
      end = jnp.clip(token + 1 + keys - self.queries, 0, keys)
    whole_end = end
    if self.masks_by_value:
      seen = self.visible.key_ranges(self.queries, keys)
      first, last, exact = (x[batch, token] for x in seen)
      begin, end = jnp.maximum(begin, first), jnp.minimum(end, last)
      whole_end = jnp.where(exact, end, 0)
    return KeyRanges(begin, end, begin, whole_end)

  def tile_ranges(self, rows: int) -> KeyRanges:
    """The keys that a tile of rows reads, and those that need no mask.

    Args:
      rows: r, a divisor of R.

    Returns:
      Ranges [T * R / r]: of the keys that at least one row of the tile may see,
      and of those that all of its rows see; M in tiles without active pairs.
      The tiles of a head ascend in all four numbers.
    """
    ranges = (x.reshape(-1, rows) for x in self.row_ranges())
    begin, end, whole_begin, whole_end = ranges
    empty = self.blocks.token.reshape(-1, rows) == self.queries

    def highest(x: jax.Array) -> jax.Array:
      x = jnp.where(empty, 0, x).max(-1)
      return jnp.where(empty[:, 0], self.keys, x)

    return KeyRanges(
      begin.min(-1), highest(end), highest(whole_begin), whole_end.min(-1)
    )

  def key_bounds(self, rows: int) -> tuple[jax.Array, jax.Array]:
    """How many leading keys each tile of rows reads without and with a mask.

    These are `tile_ranges` for loops that begin at the first key.

    Args:
      rows: r, a divisor of R.

    Returns:
      unmasked, keys that every row of the tile sees, and end, keys that at
      least one row may see; both [T * R / r] int32. A tile without active pairs
      has unmasked M and end 0.
    """
    begin, end, whole_begin, whole_end = self.tile_ranges(rows)
    reads = begin < end
    unmasked = jnp.where((whole_begin > 0) & reads, 0, whole_end)
    return unmasked, jnp.where(reads, end, 0)

  def row_masks(self) -> tuple[jax.Array | None, jax.Array | None]:
    """What decides which keys each row sees, [T * R] int32 each, or None.

    Returns:
      The last key that a causal row sees, M in empty rows; and the segment of
      the row's token, arbitrary in empty rows.
    """
    last, segments = None, self.visible.segments
    if self.visible.causal:
      last = self.blocks.token.reshape(-1) + (self.keys - self.queries)
    if segments is not None:
      heads = self.group * self.kv_heads
      token = jnp.minimum(self.blocks.token, self.queries - 1)
      segments = segments[self.blocks.head[:, None] // heads, token].reshape(-1)
    return last, segments


@dataclasses.dataclass(frozen=True)
class Argument:
  """An input or output of a kernel: the whole array, and a program's part."""

  array: jax.Array | jax.ShapeDtypeStruct
  spec: pl.BlockSpec


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
  """Shape and dtype of an array."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Kernels(Protocol):
  """The functions that each back end's module, `triton` and `tpu`, defines.

  Rows are [T * R, D], one number per row is [T * R]; keys and values are
  [B, M, K, D]. In results, rows of unused blocks are undefined.

  Keys have the dtype of the queries; gradients of the output have that of the
  values and are 0 in empty rows. The forward pass also takes keys and values
  of a narrower dtype and widens each tile after loading it.
  """

  def check_rows(self, rows: int) -> None:
    """Raises ValueError if blocks cannot have this many rows."""

  def forward(
    self, problem: Problem, q: jax.Array, keys: Arrays, tile: Tile
  ) -> Arrays:
    """Computes the attention of the rows.

    Args:
      problem: the call.
      q: the queries, as `attention.forward_queries` returns them.
      keys: keys and values.
      tile: sizes; TPUs ignore `tile.rows` and take the rows of a block.

    Returns:
      Rows of the output and the base-2 log-sum-exp of each row, float32; both
      are 0 where a row sees no key.
    """

  def query_gradient(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """Computes the gradient of the queries.

    Args:
      problem: the call.
      rows: queries, output, log-sum-exp (both from `forward`) and gradient of
        the output.
      keys: keys and values.
      tile: sizes.

    Returns:
      Rows in the dtype of the queries, and the inner product of each row's
      output and gradient, float32.
    """

  def key_gradients(
    self, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """Computes the gradients of keys and values, in their shapes and dtypes.

    Args:
      problem: the call.
      rows: queries, log-sum-exp (from `forward`), inner products (from
        `query_gradient`) and gradient of the output.
      keys: keys and values.
      tile: sizes.
    """
