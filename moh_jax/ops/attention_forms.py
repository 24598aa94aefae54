"""What decides about the form of attention of a call, and the form.

Every form is a module, an entry of `attention.BACKENDS`: it says what it cannot
do, and does the rest, with its gradients.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.target import Target


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


# Largest size of the logits [B, H, N, M] float32 that a device holds at once.
# On a CPU it is what the caches hold: several times slower beyond.
MAX_LOGITS_BYTES = {"cpu": 12 << 20, "gpu": 1 << 30, "tpu": 1 << 30}

# On a CPU, sequences shorter than this take blocks of 32 rows, or all logits of
# one at once.
SHORT = 384


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """The properties of a call that decide about its form.

  Sizes are those of the part that one device computes.

  Attributes:
    target: the device that it runs on.
    batch: B.
    queries: N.
    keys: M.
    num_heads: H.
    head_dim: D.
    share: expected share of the heads that are active, 1 for all.
    causal: whether later keys are hidden.
    masked: whether cuDNN would read what is hidden as an array: segments, and
      where attention is causal a key mask, or fewer or more queries than keys.
    biased: whether a bias is added to the logits.
    group: query heads that read one key/value head, H / K.
    dtype: name of the widest dtype of queries, keys and values.
    one_device: whether the arrays are one device's own. Else the compiler
      splits them over a mesh, which it can do to plain XLA alone.
    has_cudnn: whether programs with cuDNN can be traced here.
    checked: whether `jax.shard_map` checks how values vary, `check_vma`.
  """

  target: Target
  batch: int
  queries: int
  keys: int
  num_heads: int
  head_dim: int
  share: float
  causal: bool = False
  masked: bool = False
  biased: bool = False
  group: int = 1
  dtype: str = "float32"
  one_device: bool = True
  has_cudnn: bool = True
  checked: bool = False

  @property
  def on_cpu(self) -> bool:
    """Whether it runs on a CPU."""
    return self.target.platform == "cpu"

  @property
  def check_problem(self) -> str:
    """What a kernel needs whose results have no type that can be checked."""
    return "check_vma=False of jax.shard_map" if self.checked else ""

  @property
  def is_small(self) -> bool:
    """Whether all logits, float32, may be in memory at once."""
    size = 4 * self.batch * self.num_heads * self.queries * self.keys
    return size <= MAX_LOGITS_BYTES.get(self.target.platform, 0)


@dataclasses.dataclass(frozen=True)
class Form:
  """A form of attention, with the sizes of its blocks.

  Attributes:
    name: a key of `attention.BACKENDS`.
    packs: whether only the active heads are computed.
    rows: rows of a block; 0 for forms without blocks.
    blocks_per_step: blocks of a key/value head that one step of the loop
      computes, at most.
    one_by_one: whether "dense" computes one sequence of the batch after
      another.
    backend: what computes it, as `crossovers.Crossover` names it.
  """

  name: str
  packs: bool = False
  rows: int = 0
  blocks_per_step: int = 1
  one_by_one: bool = False
  backend: str = dataclasses.field(default="xla", compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
  """What a form computes with.

  Attributes:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    visible: which keys a query sees.
    scale: factor of the logits.
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


class Backend(Protocol):
  """The functions that the module of a form defines."""

  def unable(self, case: AttentionCase) -> str:
    """What the form would need that a call has not; empty if nothing."""

  def suits(self, case: AttentionCase, *, packs: bool) -> bool:
    """Whether no form after it in `attention.BACKENDS` is faster.

    Args:
      case: the call.
      packs: whether to compute the active heads alone, or every head.
    """

  def form(self, case: AttentionCase, *, packs: bool) -> Form:
    """The form with its sizes, for a call that it is able to compute.

    Args:
      case: the call.
      packs: whether to compute the active heads alone, where it can.
    """

  def attend(self, call: Call, form: Form) -> jax.Array:
    """Computes a call.

    Args:
      call: the arrays.
      form: from the module's `form`.

    Returns:
      [B, N, H, D] in the dtype of v; 0 for queries that see no key, and
      unspecified for inactive heads.
    """
