"""What one call of the kernels is about, and the tables that they read.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, T blocks, R rows of a block.
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moh_jax.ops.head_blocks import HeadBlocks
from moh_jax.ops.kernels.sizes import Tile
from moh_jax.ops.visible import Visible

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Problem:
  """One call of the attention.

  Attributes:
    k_shape: B, M, K and the head dim.
    dtype: of the queries and keys.
    visible: which keys a query sees.
    blocks: the pairs at work.
    scale: factor of the logits.
    interpret: whether the kernels run in Pallas's interpreter.
    cached: whether keys and values are those of a cache, for which there is
      the forward pass alone; its output is float32.
  """

  k_shape: tuple[int, ...]
  dtype: jnp.dtype
  visible: Visible
  blocks: HeadBlocks
  scale: float
  interpret: bool
  cached: bool = False

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
    return self.blocks.row.shape[0] // (self.batch * self.kv_heads)

  @property
  def rows(self) -> int:
    """R."""
    return self.blocks.token.shape[1]

  @property
  def num_blocks(self) -> int:
    """T."""
    return self.blocks.token.shape[0]

  @property
  def selective(self) -> bool:
    """Whether keys are hidden by values, not by their place alone."""
    visible = self.visible
    return visible.key_mask is not None or visible.segments is not None

  @property
  def factor(self) -> float:
    """Of the products of queries and keys: logits of a softmax in base 2."""
    return self.scale * LOG2_E

  def widen(self, x: jax.Array) -> jax.Array:
    """Keys or values as the forward pass multiplies them, see `Kernels`."""
    return x.astype(jnp.promote_types(x.dtype, self.dtype))

  def output(self, q: jax.Array, v: jax.Array) -> jax.ShapeDtypeStruct:
    """Rows that the forward pass makes of rows of queries."""
    return jax.ShapeDtypeStruct(
      q.shape, jnp.float32 if self.cached else v.dtype
    )

  def last_keys(self) -> jax.Array:
    """The last key that a causal row sees, [T * R] int32; M if empty."""
    return self.blocks.token.reshape(-1) + (self.keys - self.queries)

  def reach(self, rows: int) -> tuple[jax.Array, jax.Array]:
    """Keys at the start that all rows of a part see, and that any row may.

    Args:
      rows: of a part, a divisor of R.

    Returns:
      Two of [T * R / rows] int32. A part without rows has (M, 0).
    """
    token = self.blocks.token.reshape(-1, rows)
    empty = token[:, 0] == self.queries
    if not self.visible.causal:
      least = jnp.full(len(token), self.keys, jnp.int32)
      return least, jnp.where(empty, 0, least)
    last = jnp.where(token == self.queries, -1, token).max(-1)
    ends = jnp.stack([token[:, 0], last]) + (1 + self.keys - self.queries)
    least, most = jnp.clip(ends, 0, self.keys)
    return jnp.where(empty, self.keys, least), jnp.where(empty, 0, most)

  def row_segments(self) -> jax.Array | None:
    """The segment of every row, [T * R] int32; of any token where empty."""
    segments = self.visible.segments
    if segments is None:
      return None
    heads = self.group * self.kv_heads
    token = jnp.minimum(self.blocks.token, self.queries - 1)
    return segments[self.blocks.head[:, None] // heads, token].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Argument:
  """An array, or the shape of an output, and what a program sees of it."""

  array: jax.Array | jax.ShapeDtypeStruct
  spec: pl.BlockSpec


class Kernels(Protocol):
  """What a platform's module has.

  Rows are [T * R, D], numbers of rows [T * R]; keys and values [B, M, K, D].
  Rows of blocks that are not in use are not defined where they are results.
  Keys have the dtype of the queries; gradients of the output have that of the
  values and are 0 in empty rows. The forward pass takes narrower keys and
  values too and widens what it has loaded.
  """

  def check_rows(self, rows: int) -> None:
    """Raises ValueError if blocks cannot have so many rows."""

  def forward(
    self, problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, tile: Tile
  ) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows.

    Args:
      problem: the call.
      q: rows of the queries.
      k: keys.
      v: values.
      tile: sizes; TPUs take the rows of a block whatever it says.

    Returns:
      Rows in the dtype of v, float32 if it is a cache's, and the log-sum-exp
      of each in base 2, float32; both are 0 where a row sees no key.
    """

  def query_gradient(
    self,
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    grad: jax.Array,
    tile: Tile,
  ) -> tuple[jax.Array, jax.Array]:
    """Gradient of the rows of the queries.

    Args:
      problem: as for `forward`, like q, k, v and tile.
      q: rows.
      k: keys.
      v: values.
      out: rows from `forward`.
      log_sums: from `forward`.
      grad: rows, of the output.
      tile: sizes.

    Returns:
      Rows in the dtype of q and the inner product of every row's output and
      gradient, float32.
    """

  def key_gradients(
    self,
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_sums: jax.Array,
    inner: jax.Array,
    grad: jax.Array,
    tile: Tile,
  ) -> tuple[jax.Array, jax.Array]:
    """Gradients of keys and values, in their shapes and dtypes.

    Args:
      problem: as for `query_gradient`, like q, k, v, log_sums, grad and tile.
      q: rows.
      k: keys.
      v: values.
      log_sums: from `forward`.
      inner: from `query_gradient`.
      grad: rows.
      tile: sizes.
    """
