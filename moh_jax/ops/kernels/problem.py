"""One call of the kernels of attention or decoding, and what they read of it.

Shapes: B batch, N queries, M keys (slots of a cache), H query heads, K
key/value heads, G query heads of a key/value head, D head dim, T blocks, R rows
of a block, r rows of a tile, L keys of a tile, P tiles of rows, J tiles of
keys; where one token is decoded, L entries of a list of heads.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moh_jax.ops.attention_forms import Visible
from moh_jax.ops.cache import LayerCache
from moh_jax.ops.head_blocks import HeadBlocks, gather_rows, scatter_rows
from moh_jax.ops.target import Target

MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tile:
  """How much of the attention matrix a kernel works on at a time.

  Attributes:
    rows: rows of a tile: (token, head) pairs of one key/value head.
    keys: columns of a tile: keys.
    warps: warps of a program; Triton only.
    stages: stages of the software pipeline that loads tiles; GPUs only.

  Raises:
    ValueError: a size is not an integer of at least 1.
  """

  rows: int
  keys: int
  warps: int = 4
  stages: int = 2

  def __post_init__(self):
    for name, value in vars(self).items():
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")

  def cut(self, rows: int) -> "Tile":
    """Returns a tile with at most this many rows, and warps to match."""
    if self.rows <= rows:
      return self
    warps = max(min(4, self.warps), self.warps * rows // self.rows)
    return dataclasses.replace(self, rows=rows, warps=warps)


class Key(NamedTuple):
  """What measured sizes are for.

  Attributes:
    backend: of Pallas, "triton", "mosaic_gpu" or "mosaic_tpu".
    device: `jax.Device.device_kind`.
    head_dim: D.
    dtype: name of the queries' dtype.
  """

  backend: str
  device: str
  head_dim: int
  dtype: str


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Tiles of the three kernels.

  Attributes:
    forward: tile of the forward pass; its rows are R, the rows of a block of
      the table of active heads.
    dq: tile for the gradient of the queries; on GPUs its rows divide R.
    dkv: tile for the gradients of keys and values; on GPUs its rows divide R.
  """

  forward: Tile
  dq: Tile
  dkv: Tile

  @classmethod
  def of(cls, *tiles: tuple[int, ...]) -> "BlockSizes":
    """The tiles of the three kernels, from the numbers of each."""
    return cls(*(Tile(*tile) for tile in tiles))

  @property
  def rows(self) -> int:
    """R, the rows that `head_blocks` should give its blocks."""
    return self.forward.rows

  def with_rows(self, rows: int) -> "BlockSizes":
    """Returns the sizes for a table whose blocks have this many rows."""
    forward = dataclasses.replace(self.forward.cut(rows), rows=rows)
    # This kernel loops over rows and its warps share the keys: as many stay.
    dkv = dataclasses.replace(self.dkv, rows=min(self.dkv.rows, rows))
    return BlockSizes(forward, self.dq.cut(rows), dkv)


def fitting(table: dict, head_dim: int, dtype: jax.typing.DTypeLike) -> Any:
  """Looks up the default sizes of a back end.

  Args:
    table: by bytes of a number, 2 or 4, and largest head dim.
    head_dim: D.
    dtype: of the queries.

  Raises:
    ValueError: the head dim is too large.
  """
  sizes = table[max(2, min(4, jnp.dtype(dtype).itemsize))]
  if head_dim > max(sizes):
    raise ValueError(f"head_dim={head_dim} must be at most {max(sizes)}")
  return sizes[min(x for x in sizes if head_dim <= x)]


LOG2_E = math.log2(math.e)
_STATIC = {"static": True}

# Inputs or outputs of a kernel.
Arrays = tuple[jax.Array, ...]


class Ranges(NamedTuple):
  """Ranges of what may be seen, [begin, end), and of what surely is.

  For instance, causal attention of a tile with tokens 3, 5 and 6: the tile
  reads the keys [0, 7), and all of its rows see the keys [0, 4), so these need
  no mask. All are int32 arrays of one shape: keys, or tiles of a loop.

  Attributes:
    begin: the first that may be seen.
    whole_begin: the first that surely is seen.
    whole_end: where these end; at most `whole_begin` if there are none.
    end: where those that may be seen end; at most `begin` if there are none.
  """

  begin: jax.Array
  whole_begin: jax.Array
  whole_end: jax.Array
  end: jax.Array

  def ordered(self) -> "Ranges":
    """Moves them so that begin <= whole_begin <= whole_end <= end."""
    end = jnp.maximum(self.begin, self.end)
    first = jnp.clip(self.whole_begin, self.begin, end)
    last = jnp.clip(self.whole_end, first, end)
    return Ranges(self.begin, first, last, end)


class _Shapes:
  """Sizes of a call by name, from its `k_shape` (B, M, K, D) and its scale."""

  k_shape: tuple[int, ...]
  scale: float

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
  def log2_scale(self) -> float:
    """Factor that turns q k^T into logits of a softmax in base 2."""
    return self.scale * LOG2_E

  @property
  def exponent_scale(self) -> float:
    """Factor of logits that turns them into exponents of 2.

    It is positive, so that the largest logit is the largest before it too: a
    scale of at most 0 is applied to the logits themselves.
    """
    return self.log2_scale if self.scale > 0 else 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem(_Shapes):
  """One call of the attention: shapes, masks, the table of active heads.

  On a TPU several narrow heads may be one here, see `Tpu.to_rows`: K and D are
  then those of `Kernels.arranged`.

  Attributes:
    k_shape: (B, M, K, D), the shape of keys and values.
    dtype: of queries, keys and values.
    visible: which keys a query sees.
    blocks: the active (token, head) pairs.
    scale: factor of the logits.
    interpret: whether the kernels run in Pallas's interpreter.
  """

  k_shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
  dtype: jnp.dtype = dataclasses.field(metadata=_STATIC)
  visible: Visible
  blocks: HeadBlocks
  scale: float = dataclasses.field(metadata=_STATIC)
  interpret: bool = dataclasses.field(metadata=_STATIC)

  @property
  def queries(self) -> int:
    """N."""
    return self.blocks.row.shape[1]

  @property
  def group(self) -> int:
    """G."""
    return self.blocks.row.shape[2] // self.kv_heads

  @property
  def together(self) -> int:
    """Key/value heads of the table that are one here, m; 1 on GPUs."""
    return self.blocks.rank.shape[2] // self.kv_heads

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
  def row_outputs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Results of the kernels that add to rows: a vector and a number each."""
    count = self.num_blocks * self.rows
    return (
      jax.ShapeDtypeStruct((count, self.head_dim), self.dtype),
      jax.ShapeDtypeStruct((count,), jnp.float32),
    )

  @property
  def key_outputs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Gradients of keys and values."""
    return (jax.ShapeDtypeStruct(self.k_shape, self.dtype),) * 2

  def scaled(self, products: jax.Array) -> jax.Array:
    """Products that are base-2 logits once times `exponent_scale`."""
    return products if self.scale > 0 else products * self.log2_scale

  def ranges(self, batch: jax.Array, token: jax.Array) -> Ranges:
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
    return Ranges(begin, begin, whole_end, end)

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
      token = jnp.minimum(self.blocks.token, self.queries - 1)
      segments = segments[self.blocks.batches()[:, None], token].reshape(-1)
    return last, segments


def keys_of_rows(problem: Problem, rows: int, keys: int) -> Ranges:
  """Ordered ranges of each row tile's loop over the tiles of keys, [P].

  A tile reads the keys that at least one of its rows may see; those that all of
  its rows see need no mask. The tiles of a head ascend in all four numbers.

  Args:
    problem: the call.
    rows: r, a divisor of R.
    keys: L.
  """
  # By blocks, and with M in empty rows, so that XLA makes the ranges of row
  # tiles of all sizes in one pass.
  token = problem.blocks.token
  batch = problem.blocks.batches()[:, None]
  ranges = problem.ranges(batch, jnp.minimum(token, problem.queries - 1))
  empty = (token == problem.queries).reshape(-1, rows)
  begin, whole_begin, whole_end, end = (
    jnp.where(token == problem.queries, problem.keys, x).reshape(-1, rows)
    for x in ranges
  )
  begin, whole_end = begin.min(-1), whole_end.min(-1)
  whole_begin, end = (
    jnp.where(empty, 0, x).max(-1) for x in (whole_begin, end)
  )
  stop = jnp.where(begin < end, pl.cdiv(end, keys), 0)
  start = jnp.minimum(begin // keys, stop)
  whole = pl.cdiv(whole_begin, keys), whole_end // keys
  return Ranges(start, *whole, stop).ordered()


def rows_of_keys(problem: Problem, rows: int, keys: int) -> Ranges:
  """Ordered ranges of each key tile's loop over row tiles, [B * K, J].

  Rows of a key/value head ascend by token, so the row tiles that read a tile of
  keys follow one another. One head of the problem is one of the table.

  Args:
    problem: the call.
    rows: r.
    keys: L.
  """
  start = jnp.arange(0, problem.keys, keys, dtype=jnp.int32)
  stop = jnp.minimum(start + keys, problem.keys)
  begin, whole_begin, whole_end, end = problem.ranges(
    *jnp.indices((problem.batch, problem.queries), jnp.int32)
  )
  values = jnp.stack([end, whole_end, whole_begin, begin])
  targets = jnp.stack([start + 1, stop, start + 1, stop])
  # Values ascend by token, so these tokens are the first ones.
  tokens = values[:, :, None] < targets[:, None, :, None]  # [4, B, J, N]
  tokens = tokens.sum(-1, dtype=jnp.int32)
  rank = problem.blocks.rank
  batch = jnp.arange(problem.batch)[None, :, None]
  below = rank[batch, jnp.maximum(tokens - 1, 0)]  # rows of each one
  below = jnp.where((tokens > 0)[..., None], below, 0)  # [4, B, J, K]
  count = rank[None, :, -1:]
  next_tile = pl.cdiv(below, rows)
  # The tile of the next row; after the last tile if there is no such row.
  tile = jnp.where(below < count, below // rows, next_tile)
  bounds = Ranges(tile[0], next_tile[1], tile[2], next_tile[3]).ordered()
  first = problem.blocks.first[:-1].reshape(problem.batch, 1, -1)
  first = first * (problem.rows // rows)
  return Ranges(
    *((first + x).swapaxes(1, 2).reshape(-1, len(start)) for x in bounds)
  )


@dataclasses.dataclass(frozen=True)
class Argument:
  """An input or output of a kernel: the whole array, and a program's part."""

  array: jax.Array | jax.ShapeDtypeStruct
  spec: pl.BlockSpec


def across(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies rows [X, D] with rows [Y, D] to [X, Y] float32."""
  return _product(a, b, (((1,), (1,)), ((), ())))


def times(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies [X, Y] with [Y, D] to [X, D] float32."""
  return _product(a, b, (((1,), (0,)), ((), ())))


def _product(a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
  return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class HeadList:
  """The key/value heads that each text reads.

  Attributes:
    head: [B, L] int32 heads that are read, ascending, then arbitrary ones.
    count: [B] int32 entries of each list that are read.
    entry: [B, K] int32 the entry of each head; arbitrary for others.
  """

  head: jax.Array
  count: jax.Array
  entry: jax.Array


def head_list(is_read: jax.Array, most: int) -> HeadList:
  """Makes the lists, in time linear in the number of heads.

  Args:
    is_read: [B, K] bool.
    most: L, heads that any text reads at most.
  """
  batch, heads = is_read.shape
  ended = jnp.cumsum(is_read, axis=1, dtype=jnp.int32)
  place = jnp.where(is_read, ended - 1, most)
  text = jnp.arange(batch, dtype=jnp.int32)[:, None]
  head = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), is_read.shape)
  empty = jnp.zeros((batch, most), jnp.int32)
  listed = empty.at[text, place].set(head, mode="drop")
  return HeadList(listed, ended[:, -1], jnp.clip(ended - 1, 0, most - 1))


@dataclasses.dataclass(frozen=True)
class DecodeProblem(_Shapes):
  """Attention of one new token of each text to a cache.

  Attributes:
    cache: keys and values, [B, K, M, D].
    heads: the key/value heads that are read.
    first: [B] int32 first slot that a text's token sees.
    end: [B] int32 slot after the last one that it sees.
    dtype: in which queries and keys are multiplied.
    interpret: whether the kernels run in Pallas's interpreter.
  """

  cache: LayerCache
  heads: HeadList
  first: jax.Array
  end: jax.Array
  dtype: jnp.dtype
  interpret: bool

  @property
  def k_shape(self) -> tuple[int, ...]:
    """(B, M, K, D)."""
    batch, heads, slots, dim = self.cache.k.shape
    return batch, slots, heads, dim

  @property
  def scale(self) -> float:
    """Factor of the logits."""
    return self.head_dim**-0.5

  @property
  def entries(self) -> int:
    """L."""
    return self.heads.head.shape[1]


class Kernels(Protocol):
  """The kernels of one back end of Pallas.

  Rows are [T * R, D], one number per row is [T * R]; keys and values are
  [B, M, K, D]. All have the dtype of the problem, but for numbers per row,
  which are float32. In results, rows of unused blocks are undefined.

  Attributes:
    tiles: default `BlockSizes`, see `fitting`.
    few_rows: key/value heads with fewer rows than this get blocks of half the
      rows,
    least_rows: or of so many rows.
    cuts_blocks: whether gradients cut the rows of a block into tiles.
    picks_rows: whether the forward kernel picks its rows out of [B, N, H, D]
      itself: there is no pass over the queries before it.
  """

  tiles: ClassVar[dict[int, dict[int, BlockSizes]]]
  few_rows: ClassVar[int] = 512
  least_rows: ClassVar[int] = 64
  cuts_blocks: ClassVar[bool] = True
  picks_rows: ClassVar[bool] = False

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """What the kernels need to run on a device that is not there; else empty.

    Args:
      device: the device; a CPU interprets kernels.
      dtype: name of the dtype of queries, keys and values; empty if unknown.
      head_dim: D.
    """

  def rows_must_be(self, rows: int) -> str:
    """What the rows of a block must be and are not; else empty."""

  def check(self, sizes: BlockSizes) -> None:
    """Raises ValueError if blocks or tiles cannot have these sizes.

    On GPUs the rows of dq and dkv must divide R: a block's last rows would be
    in no tile, so in no gradient.
    """
    rows = sizes.rows
    if reason := self.rows_must_be(rows):
      raise ValueError(f"rows={rows} of a block must be {reason}")
    for name in ("dq", "dkv") if self.cuts_blocks else ():
      if rows % (part := getattr(sizes, name).rows):
        raise ValueError(f"{name}.rows={part} must divide forward.rows={rows}")

  def lacks(self, dtype: str, head_dim: int) -> str:
    """What the kernels need of a dtype and a head dim; else empty."""
    return ""

  def arranged(self, x: jax.Array) -> jax.Array:
    """Keys or values [B, M, K, D] as the kernels read them."""
    return x

  def to_rows(self, problem: Problem, x: jax.Array) -> jax.Array:
    """Reorders pairs [B, N, H, D] to rows; 0 in empty rows."""
    return gather_rows(x, problem.blocks)

  def to_pairs(self, problem: Problem, rows: jax.Array, dim: int) -> jax.Array:
    """Reorders rows, results of a kernel, to pairs [B, N, H, D]; 0 if inactive.

    Args:
      problem: the call.
      rows: [T * R, head dim of the problem].
      dim: D.
    """
    return scatter_rows(rows, problem.blocks)

  def run(
    self, name: str, problem: Problem, rows: Arrays, keys: Arrays, tile: Tile
  ) -> Arrays:
    """Runs a kernel.

    - "forward" maps queries to the output and the base-2 log-sum-exp of each
      row; both are 0 where a row sees no key.
    - "dq" maps queries, output, log-sum-exp and gradient of the output to the
      gradient of the queries, and the inner product of each row's output and
      gradient.
    - "dkv" maps queries, log-sum-exp, these inner products and the gradient of
      the output to the gradients of keys and values.

    Args:
      name: one of these.
      problem: the call.
      rows: what the kernel maps, 0 in empty rows; the queries of "forward" are
        [B, N, H, D] if `picks_rows`.
      keys: keys and values.
      tile: sizes; TPUs ignore `tile.rows` and take the rows of a block.
    """
