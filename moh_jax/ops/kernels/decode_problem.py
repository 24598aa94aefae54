"""One call of the decoding kernels, and the key/value heads that it reads.

Shapes: B texts, K key/value heads, M slots, D head dim, L entries of a list of
heads.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moh_jax.ops.cache import LayerCache
from moh_jax.ops.kernels.problem import LOG2_E


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
class DecodeProblem:
  """Attention of one new token of each text to a cache.

  Attributes:
    cache: keys and values, [B, K, M, D].
    heads: the key/value heads that are read.
    first: [B] int32 first slot that a text's token sees.
    end: [B] int32 slot after the last one that it sees.
    dtype: in which queries and keys are multiplied.
    scale: factor of the logits.
    interpret: whether the kernels run in Pallas's interpreter.
  """

  cache: LayerCache
  heads: HeadList
  first: jax.Array
  end: jax.Array
  dtype: jnp.dtype
  scale: float
  interpret: bool

  @property
  def batch(self) -> int:
    """B."""
    return self.cache.k.shape[0]

  @property
  def kv_heads(self) -> int:
    """K."""
    return self.cache.k.shape[1]

  @property
  def slots(self) -> int:
    """M."""
    return self.cache.k.shape[2]

  @property
  def head_dim(self) -> int:
    """D."""
    return self.cache.k.shape[3]

  @property
  def entries(self) -> int:
    """L."""
    return self.heads.head.shape[1]

  @property
  def log2_scale(self) -> float:
    """Factor that turns q k^T into logits of a softmax in base 2."""
    return self.scale * LOG2_E
