"""One call of attention: its arrays, and which keys a query sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.pairs import ActiveHeads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
  """Which keys a query sees; a mask that is None hides nothing.

  Attributes:
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees only keys of its own
      segment (a document of several packed into one sequence).
    causal: query n sees the keys up to n + M - N, so fewer queries than keys
      are the last ones of the sequence.
  """

  key_mask: jax.Array | None = None
  segments: jax.Array | None = None
  causal: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def everything(self) -> bool:
    """Whether nothing is hidden."""
    return self.key_mask is None and self.segments is None and not self.causal

  def mask(self, num_queries: int, num_keys: int) -> jax.Array | None:
    """One mask [B or 1, 1, N or 1, M] for all; None if nothing is hidden."""
    masks = []
    if self.key_mask is not None:
      masks.append(self.key_mask[:, None, None, :])
    if self.segments is not None:
      equal = self.segments[:, :, None] == self.segments[:, None, :]
      masks.append(equal[:, None])
    if self.causal:
      last = num_keys - num_queries
      masks.append(jnp.tri(num_queries, num_keys, last, bool)[None, None])
    return functools.reduce(jnp.logical_and, masks) if masks else None

  def key_ranges(
    self, num_queries: int, num_keys: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys that `key_mask` and `segments` let a query see, as a range.

    Segments count as ranges where each is one run of tokens and the runs ascend
    (documents packed into a sequence), except that the last run may be lower
    than the first (padding, 0). Otherwise every key is in the range.

    Args:
      num_queries: N.
      num_keys: M.

    Returns:
      begin and end, [B, N] int32: a query sees no key outside of [begin, end);
      and exact, [B, N] bool: whether it sees every key inside.
    """
    begin, end, exact = jnp.int32(0), jnp.int32(num_keys), jnp.bool_(True)
    if self.segments is not None:
      begin, end, exact = _runs(self.segments)
    if self.key_mask is not None:
      first = jnp.argmax(self.key_mask, -1, keepdims=True)
      last = num_keys - jnp.argmax(self.key_mask[:, ::-1], -1, keepdims=True)
      count = self.key_mask.sum(-1, keepdims=True)
      last = jnp.where(count == 0, 0, last)
      begin = jnp.maximum(begin, first.astype(jnp.int32))
      end = jnp.minimum(end, last.astype(jnp.int32))
      exact = exact & (count == last - first)
    masks = [x for x in (self.key_mask, self.segments) if x is not None]
    shape = len(masks[0]) if masks else 1, num_queries
    begin, end, exact = (
      jnp.broadcast_to(x, shape) for x in (begin, end, exact)
    )
    return begin, end, exact


def _runs(segments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Begin and end of each token's segment; all tokens where not in runs."""
  count = segments.shape[1]
  before, after = segments[:, :-1], segments[:, 1:]
  position = jnp.arange(count, dtype=jnp.int32)
  edge = jnp.pad(before != after, ((0, 0), (1, 0)), constant_values=True)
  begin = jax.lax.cummax(jnp.where(edge, position, 0), axis=1)
  edge = jnp.pad(before != after, ((0, 0), (0, 1)), constant_values=True)
  end = jnp.where(edge, position + 1, count)
  end = jax.lax.cummin(end, axis=1, reverse=True)
  falls = (after < before).sum(-1, keepdims=True)
  wraps = (falls == 1) & (segments[:, -1:] < segments[:, :1])
  exact = (falls == 0) | wraps
  return jnp.where(exact, begin, 0), jnp.where(exact, end, count), exact


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
  """What a form computes with.

  Attributes:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    visible: which keys a query sees.
    scale: factor of the logits, above 0.
    bias: broadcastable to [B, H, N, M], or None.
    active: the active heads; None is every head.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  visible: Visible
  scale: float = dataclasses.field(metadata={"static": True})
  bias: jax.Array | None = None
  active: ActiveHeads | None = None

  # Sizes, by their letters above; each key/value head has `group` query heads.
  batch = property(lambda self: self.q.shape[0])
  queries = property(lambda self: self.q.shape[1])
  heads = property(lambda self: self.q.shape[2])
  head_dim = property(lambda self: self.q.shape[3])
  keys = property(lambda self: self.k.shape[1])
  kv_heads = property(lambda self: self.k.shape[2])
  group = property(lambda self: self.heads // self.kv_heads)

  @property
  def dtype(self) -> str:
    """Name of the widest dtype of queries, keys and values."""
    return jnp.result_type(self.q, self.k, self.v).name

  @property
  def share(self) -> float:
    """Expected share of the heads that are active."""
    return 1.0 if self.active is None else self.active.share

  @property
  def masked(self) -> bool:
    """Whether hidden keys make "auto" prefer other forms to cuDNN.

    These are segments, and where attention is causal a key mask, or fewer or
    more queries than keys.
    """
    visible = self.visible
    hides = visible.key_mask is not None or self.queries != self.keys
    return visible.segments is not None or (visible.causal and hides)
