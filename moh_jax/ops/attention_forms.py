"""What decides about the form of attention of a call, and the form.

Every form is a module, an entry of `attention.BACKENDS`: it says what it cannot
do, and does the rest, with its gradients.
"""

import dataclasses
from typing import Protocol

import jax

from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.target import Target
from moh_jax.ops.visible import Visible

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
    dtype: name of the queries' dtype.
    one_device: whether the arrays are one device's own. Else the compiler
      splits them over a mesh, which it can do to plain XLA alone.
    has_cudnn: whether programs with cuDNN can be traced here.
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
  dtype: str = "float32"
  one_device: bool = True
  has_cudnn: bool = True

  @property
  def on_cpu(self) -> bool:
    """Whether it runs on a CPU."""
    return self.target.platform == "cpu"

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
    blocks_per_step: blocks of a head computed in one step of the loop, at most.
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


@dataclasses.dataclass(frozen=True)
class Call:
  """What a form computes with.

  Attributes:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    bias: broadcastable to [B, H, N, M], or None.
    visible: which keys a query sees.
    active: the active heads; None is every head.
    scale: factor of the logits.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  bias: jax.Array | None
  visible: Visible
  active: ActiveHeads | None
  scale: float


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
