"""Attention of the active heads in one kernel, with its gradients.

The kernels read keys and values in place, and everything else as rows: the
active (token, head) pairs of `HeadBlocks`. Results are kept as rows, so their
size follows the number of active heads.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim, T blocks, R rows of a block, r rows of a
tile, L keys of a tile, P tiles of rows, J tiles of keys.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from moh_jax.ops.basics import ATTENTION, HALF
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.pairs import HeadBlocks, gather_rows, scatter_rows
from moh_jax.ops.target import Target

MAX_HEAD_DIM = 256
DTYPES = (*HALF, "float32")
LOG2_E = math.log2(math.e)
_STATIC = {"static": True}

# Inputs or outputs of a kernel.
Arrays = tuple[jax.Array, ...]


class Tile(NamedTuple):
  """How much of the attention matrix a kernel works on at a time.

  Attributes:
    rows: rows of a tile: (token, head) pairs of one key/value head.
    keys: columns of a tile: keys.
    stages: stages of the software pipeline that loads tiles; GPUs only.
  """

  rows: int
  keys: int
  stages: int = 2


class BlockSizes(NamedTuple):
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

  def with_rows(self, rows: int) -> "BlockSizes":
    """Returns the sizes for a table whose blocks have this many rows."""
    dq, dkv = (x._replace(rows=min(x.rows, rows)) for x in self[1:])
    return BlockSizes(self.forward._replace(rows=rows), dq, dkv)


def fitting(table: dict, head_dim: int, dtype: jax.typing.DTypeLike) -> Any:
  """Looks up the default sizes of a back end.

  Args:
    table: by bytes of a number, 2 or 4, and largest head dim.
    head_dim: D.
    dtype: of the queries.
  """
  sizes = table[max(2, min(4, jnp.dtype(dtype).itemsize))]
  return sizes[min(x for x in sizes if head_dim <= x)]


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
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

  # Sizes, by their letters above.
  batch = property(lambda self: self.k_shape[0])  # B
  keys = property(lambda self: self.k_shape[1])  # M
  kv_heads = property(lambda self: self.k_shape[2])  # K
  head_dim = property(lambda self: self.k_shape[3])  # D
  queries = property(lambda self: self.blocks.row.shape[1])  # N
  group = property(lambda self: self.blocks.row.shape[2] // self.kv_heads)  # G
  num_blocks = property(lambda self: self.blocks.token.shape[0])  # T
  rows = property(lambda self: self.blocks.token.shape[1])  # R

  @property
  def log2_scale(self) -> float:
    """Factor, above 0, that turns q k^T into logits of a softmax in base 2."""
    return self.scale * LOG2_E

  @property
  def together(self) -> int:
    """Key/value heads of the table that are one here, m; 1 on GPUs."""
    return self.blocks.rank.shape[2] // self.kv_heads

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


def across(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies rows [X, D] with rows [Y, D] to [X, Y] float32."""
  return _product(a, b, (((1,), (1,)), ((), ())))


def times(a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies [X, Y] with [Y, D] to [X, D] float32."""
  return _product(a, b, (((1,), (0,)), ((), ())))


def _product(a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
  return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


class Kernels:
  """The kernels of one back end of Pallas.

  Rows are [T * R, D], one number per row is [T * R]; keys and values are
  [B, M, K, D]. All have the dtype of the problem, but for numbers per row,
  which are float32. In results, rows of unused blocks are undefined.

  Attributes:
    tiles: default `BlockSizes`, see `fitting`.
    few_rows: a key/value head with fewer rows than this gets blocks of half as
      many rows,
    least_rows: but not of fewer than this.
  """

  tiles: ClassVar[dict[int, dict[int, BlockSizes]]]
  few_rows: ClassVar[int] = 512
  least_rows: ClassVar[int] = 64

  def unable(self, device: Target, dtype: str, head_dim: int) -> str:
    """What the kernels need to run on a device that is not there; else empty.

    Args:
      device: the device; a CPU interprets kernels.
      dtype: name of the dtype of queries, keys and values.
      head_dim: D.
    """

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
      rows: what the kernel maps, 0 in empty rows.
      keys: keys and values.
      tile: sizes; TPUs ignore `tile.rows` and take the rows of a block.
    """


def block_sizes(
  kernels: Kernels,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  per_head: int | None = None,
) -> BlockSizes:
  """The tiles of a back end.

  Args:
    kernels: of the back end.
    head_dim: D, at most 256.
    dtype: dtype of the queries.
    per_head: rows that a key/value head has on average, N * active heads / K:
      blocks get smaller where these are few. None keeps the blocks as they are.
  """
  sizes = fitting(kernels.tiles, head_dim, dtype)
  # The last block of each is half empty on average, which costs more the fewer
  # blocks there are.
  if per_head is not None and per_head < kernels.few_rows:
    least = min(kernels.least_rows, sizes.forward.rows)
    sizes = sizes.with_rows(max(least, sizes.forward.rows // 2))
  return sizes


def kernel_attention(
  call: Call,
  blocks: HeadBlocks,
  kernels: Kernels,
  *,
  sizes: BlockSizes | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of the (token, head) pairs in a table, as one kernel.

  Products are in the widest dtype of queries, keys and values, sums in float32.
  Products of float32 inputs have the precision of
  `jax.default_matmul_precision`, as anywhere in JAX.

  Args:
    call: arrays, without a bias.
    blocks: the active pairs, in blocks of the key/value heads. The rows of a
      block, R, are 64 or 128 on Hopper and a multiple of 8 on a TPU.
    kernels: of a back end.
    sizes: sizes of the tiles; None is `block_sizes`. Tiles are reduced where R
      is smaller than theirs.
    interpret: runs the kernels in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for inactive pairs and for queries that
    see no key.
  """
  q, k, v = call.q, call.k, call.v
  dtype = jnp.result_type(q, k, v)
  if sizes is None:
    sizes = block_sizes(kernels, q.shape[-1], dtype)
  sizes = sizes.with_rows(blocks.token.shape[1])
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  k, v = kernels.arranged(k), kernels.arranged(v)
  masks, scale = call.visible, float(call.scale)
  problem = Problem(k.shape, dtype, masks, blocks, scale, interpret)
  out = _attend_rows(q, k, v, problem, (kernels, sizes))
  return out.astype(call.v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_rows(q, k, v, problem, options):
  return _forward(q, k, v, problem, options)[0]


# Indices in kernels are int32, also with `jax_enable_x64`.
@jax.enable_x64(False)
def _forward(q, k, v, problem, options):
  (kernels, sizes), dim = options, q.shape[-1]
  rows = kernels.to_rows(problem, q)
  out, log_sums = checkpoint_name(
    kernels.run("forward", problem, (rows,), (k, v), sizes.forward), ATTENTION
  )
  saved = rows, k, v, problem, out, log_sums
  return kernels.to_pairs(problem, out, dim), saved


@jax.enable_x64(False)
def _backward(options, saved, grad):
  (kernels, sizes), dim = options, grad.shape[-1]
  rows, k, v, problem, out, log_sums = saved
  grad = kernels.to_rows(problem, grad)
  given = rows, out, log_sums, grad
  dq, inner = kernels.run("dq", problem, given, (k, v), sizes.dq)
  given = rows, log_sums, inner, grad
  dk, dv = kernels.run("dkv", problem, given, (k, v), sizes.dkv)
  return kernels.to_pairs(problem, dq, dim), dk, dv, None


_attend_rows.defvjp(_forward, _backward)
