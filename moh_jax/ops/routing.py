"""Mixture-of-Head routing: which heads a token uses, and with what gates.

The same router serves every family (MoH, arXiv:2410.11842, section 3). The
first `shared` heads of a layer are active for all tokens; each token selects
`top_k` of the other `routed` heads. A head's output is multiplied by its gate.
Two published forms of the gates exist:

- "paper": eq. 5 and 6. The gate of shared head i is a1 * S_i, that of a
  selected routed head a2 * P_i, with S = softmax(W_s x), P = softmax(W_r x) and
  (a1, a2) = softmax(W_h x).
- "released": what the public checkpoints were trained with. The gate of a
  shared head is 2 a1 * shared * S_i. The selected P_i are first divided by
  their sum; then the gate is 2 a2 * k * P_i, with k the heads that the token
  selects. So a uniform router gives every active head the gate 1.

In both forms there is no a1 and a2 where one of the two groups is empty, and a
single shared head has S = 1. Scores and gates are float32.

Where heads have parts (`RouterConfig.structure`), routed heads are listed part
by part, and a token selects equally many of each. The softmax is still over all
routed heads.

The router "query_norm" has no parameters; it turns pre-trained models into MoH.
Heads are selected by the norms of their queries, the gates of shared and
selected heads are 1, and gradients pass straight through to the scores.

Shapes: B batch, N tokens, H heads, R routed heads, S shared heads.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget

# Norms count as equal if they deviate from their mean by less than this factor.
_EQUAL_TO = 1e-6
_TINY = 1e-30
COLLAPSED = 0.1  # a router whose load has less entropy has collapsed
LOAD_SPLIT = "heads"  # split of the rows of metrics.jsonl that hold loads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """A router's decisions for every token of one layer.

  Attributes:
    gates: [B, N, H] float32, shared heads first; exactly 0 for heads that a
      token did not select.
    probs: [B, N, R] float32 softmax over the routed heads, before the top-k.
    selected: [B, N, R] bool, top_k True per token.
    shared_scores: [B, N, S] float32 softmax over the shared heads.
    groups: [B, N, 2] float32 weights (a1, a2) of the shared and of the routed
      heads, which add up to 1; 1/2 where the layer learns none.
  """

  gates: jax.Array
  probs: jax.Array
  selected: jax.Array
  shared_scores: jax.Array
  groups: jax.Array

  def of_heads(self, size: int) -> "Routing":
    """The same decisions by head, where these are about units of heads.

    Args:
      size: heads of a unit. They have its gate, and share its scores.
    """
    by_head = functools.partial(jnp.repeat, repeats=size, axis=-1)
    return Routing(
      by_head(self.gates),
      by_head(self.probs) / size,
      by_head(self.selected),
      by_head(self.shared_scores) / size,
      self.groups,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterAux:
  """Side values of one layer's router, float32: sums over tokens.

  Sums of several devices or batches can be added; the means follow from them.
  A scanned stack of equal layers has a leading layer axis.

  Attributes:
    tokens: [] tokens that count.
    counts: [H] those of them that use each head.
    scores: [H] sums of each head's softmax score within its group.
    balance: [H] these sums with gradient, times each head's factor in the
      balance loss, which is 0 for shared heads.
    routed: whether tokens choose heads in this layer. Other layers have no
      balance loss that a model's mean should count.
  """

  tokens: jax.Array
  counts: jax.Array
  scores: jax.Array
  balance: jax.Array
  routed: bool = dataclasses.field(metadata={"static": True})

  @property
  def balance_loss(self) -> jax.Array:
    """[] load-balance loss (arXiv:2410.11842, eq. 7), 0 if nothing is routed.

    It is the sum over routed heads of f_i P_i, with f_i the share of tokens
    that select head i (without gradient) and P_i the head's mean softmax score.
    The released form multiplies by the number of routed heads, so that perfect
    balance gives top_k. Means are over the whole batch, of all devices.
    """
    return (self.load * self._mean(self.balance)).sum(-1)

  @property
  def load(self) -> jax.Array:
    """[H] share of tokens that use each head; its mean is the activated one."""
    return self._mean(self.counts)

  @property
  def heads_used(self) -> jax.Array:
    """[] heads that a token uses, on average."""
    return self.counts.sum(-1) / jnp.maximum(self.tokens, 1.0)

  @property
  def mean_score(self) -> jax.Array:
    """[H] mean score of each head, without gradient."""
    return self._mean(self.scores)

  def of_heads(self, size: int) -> "RouterAux":
    """The same by head, see `Routing.of_heads`; the balance loss stays."""
    sums = self.counts, self.scores / size, self.balance / size
    sums = (jnp.repeat(x, size) for x in sums)
    return RouterAux(self.tokens, *sums, routed=self.routed)

  def _mean(self, sums: jax.Array) -> jax.Array:
    return sums / jnp.maximum(self.tokens, 1.0)[..., None]


def top_k_mask(scores: jax.Array, k: int | jax.Array) -> jax.Array:
  """Marks each token's k best heads.

  Args:
    scores: [..., R], R routed heads.
    k: heads kept, 0 <= k <= R. An array [] may change without recompilation.

  Returns:
    [..., R] bool, k True per token; of equal scores the first are kept.
  """
  num = scores.shape[-1]
  if isinstance(k, int) and k in (0, num):
    return jnp.full_like(scores, k == num, dtype=bool)
  # Whether head j is better than head i, or equal and before it: [..., i, j].
  # Heads are few, and for a sort a mesh would gather their scores.
  ours, theirs = scores[..., :, None], scores[..., None, :]
  before = jnp.tri(num, k=-1, dtype=bool)
  before = jax.lax.broadcast_to_rank(before, ours.ndim)
  better = (theirs > ours) | ((theirs == ours) & before)
  return better.sum(-1) < k


def select_heads(
  scores: jax.Array,
  budget: HeadBudget,
  *,
  parts: int = 1,
  top_k: jax.Array | None = None,
) -> jax.Array:
  """Marks the routed heads that each token selects.

  Args:
    scores: [B, N, R], of which the largest are selected.
    budget: the layer's head split.
    parts: equal parts of the routed heads, see `Units`.
    top_k: see `num_selected`.

  Returns:
    [B, N, R] bool, `num_selected` True per token.
  """
  kept = num_selected(budget, parts=parts, top_k=top_k)
  by_part = scores.reshape(*scores.shape[:-1], parts, budget.routed // parts)
  return top_k_mask(by_part, kept // parts).reshape(scores.shape)


def num_selected(
  budget: HeadBudget, *, parts: int = 1, top_k: jax.Array | None = None
) -> int | jax.Array:
  """Counts the routed heads that each token selects.

  Args:
    budget: the layer's head split.
    parts: equal parts of the routed heads, see `Units`.
    top_k: [] int32, at least 1, replaces the budget's top_k at run time; it is
      rounded down to as many heads of each part, but to one at least. A layer
      whose budget selects no head ignores it.

  Returns:
    A multiple of parts, a number unless top_k is given.
  """
  if top_k is None or not budget.top_k:
    return budget.top_k
  return jnp.clip(top_k, parts, budget.routed) // parts * parts


def _constant(value: float, size: int, like: jax.Array) -> jax.Array:
  """[B, N, size] float32 of one value, on the devices that have `like`."""
  none = like[..., :0].astype(jnp.float32)
  return jnp.pad(none, ((0, 0), (0, 0), (0, size)), constant_values=value)


def beside_shared(
  budget: HeadBudget, gates: jax.Array, probs: jax.Array, selected: jax.Array
) -> Routing:
  """Decisions about the routed heads [B, N, R]; shared heads weigh one."""
  shared = _constant(1.0, budget.shared, gates)
  groups = _constant(0.5, 2, gates)
  gates = jnp.concatenate([shared, gates], axis=-1)
  return Routing(gates, probs, selected, shared, groups)


def two_stage_gates(
  logits: Mapping[str, jax.Array],
  budget: HeadBudget,
  batch_shape: tuple[int, ...],
  *,
  form: str = "released",
  **choice: Any,
) -> Routing:
  """Gates of the two-stage router (arXiv:2410.11842, eq. 5 and 6).

  Args:
    logits: float32. "routed" [B, N, R] W_r x, missing if the budget's top_k is
      0; "shared" [B, N, S] W_s x, missing if one head is shared or none; and
      "group" [B, N, 2] W_h x (shared first), missing to fix a1 = a2 = 1/2 (the
      paper's ablation), ignored where one group is empty.
    budget: the layer's head split.
    batch_shape: (B, N).
    form: "released" or "paper", see the module's docstring.
    **choice: `parts` and `top_k` of `select_heads`.

  Returns:
    The `Routing` of every token.
  """
  released = form == "released"
  like = next(iter(logits.values()), jnp.zeros((*batch_shape, 0)))
  if "shared" in logits:
    shared_scores = jax.nn.softmax(logits["shared"])
  else:
    shared_scores = _constant(1.0, budget.shared, like)
  if "routed" in logits:
    scores, probs = logits["routed"], jax.nn.softmax(logits["routed"])
  else:
    scores = probs = _constant(0.0, budget.routed, like)
  # By logits, since distant ones have a probability of 0 and would be ties.
  selected = select_heads(scores, budget, **choice)

  shared_gates = shared_scores
  routed_gates = jnp.where(selected, probs, 0.0)
  if released:
    total = routed_gates.sum(-1, keepdims=True)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).eps)
    routed_gates = routed_gates / total * num_selected(budget, **choice)
    shared_gates = shared_gates * budget.shared

  groups = _constant(0.5, 2, like)
  if budget.shared and budget.top_k:
    if "group" in logits:
      # Their softmax; a sum over an axis of two would be a program of its own.
      groups = jax.nn.sigmoid(logits["group"] - logits["group"][..., ::-1])
    factors = groups * 2 if released else groups
    shared_gates = shared_gates * factors[..., :1]
    routed_gates = routed_gates * factors[..., 1:]

  gates = jnp.concatenate([shared_gates, routed_gates], axis=-1)
  return Routing(gates, probs, selected, shared_scores, groups)


def query_norms(queries: jax.Array) -> jax.Array:
  """L2 norms of queries [B, N, H, D] over D, [B, N, H] float32."""
  queries = queries.astype(jnp.float32)
  squares = jnp.sum(queries * queries, axis=-1)
  # The square root has an infinite gradient at 0.
  return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def query_norm_gates(
  norms: jax.Array,
  budget: HeadBudget,
  *,
  straight_through: str = "selected",
  **choice: Any,
) -> Routing:
  """Gates 0 and 1 from the norms of the queries (arXiv:2410.11842, eq. 9, 10).

  The logit of a routed head is the norm of its query, divided by the standard
  deviation (Bessel-corrected) of the token's norms over its routed heads.
  Softmax turns logits to scores. Gates are exactly 0 or 1; in the backward pass
  the gate of a routed head counts as its score (straight-through).

  Args:
    norms: [B, N, H] float32 norms of the queries before RoPE, shared heads
      first.
    budget: the layer's head split.
    straight_through: "selected" or "all", see `RouterConfig`.
    **choice: `parts` and `top_k` of `select_heads`.

  Returns:
    The `Routing` of every token.
  """
  norms = norms[..., budget.shared :]
  if budget.routed > 1:
    mean = norms.mean(-1, keepdims=True)
    variance = jnp.square(norms - mean).sum(-1, keepdims=True)
    variance = variance / (budget.routed - 1)
    # Equal norms differ by rounding errors only. Divided by their tiny
    # deviation these would decide; logits of 0 prefer no head. (The inner
    # `where` keeps the gradient of the root finite.)
    differ = variance > jnp.square(_EQUAL_TO * mean) + _TINY
    scale = jax.lax.rsqrt(jnp.where(differ, variance, 1.0))
    norms = jnp.where(differ, norms * scale, 0.0)
  return hard_gates(norms, budget, straight_through=straight_through, **choice)


def hard_gates(
  logits: jax.Array,
  budget: HeadBudget,
  *,
  straight_through: str = "selected",
  **choice: Any,
) -> Routing:
  """Gates 0 and 1, which count as softmax scores in the backward pass.

  Args:
    logits: [B, N, R] float32, of which the largest select a head; unused where
      the budget's top_k is 0.
    budget: the layer's head split.
    straight_through: "selected" or "all", see `RouterConfig`.
    **choice: `parts` and `top_k` of `select_heads`.
  """
  if not budget.top_k:
    none = _constant(0.0, budget.routed, logits)
    return beside_shared(budget, none, none, none.astype(bool))
  probs = jax.nn.softmax(logits)
  selected = select_heads(logits, budget, **choice)

  passed = probs - jax.lax.stop_gradient(probs)  # 0 with the scores' gradient
  if straight_through == "selected":
    passed = jnp.where(selected, passed, 0.0)
  return beside_shared(budget, selected + passed, probs, selected)


def router_aux(
  routing: Routing,
  budget: HeadBudget,
  *,
  token_mask: jax.Array | None = None,
  form: str = "released",
) -> RouterAux:
  """What the balance loss and the statistics of one layer need.

  Args:
    routing: the router's decisions.
    budget: the layer's head split.
    token_mask: [B, N] bool, True for the tokens that count; None counts all.
    form: form of the balance loss, "released" or "paper".
  """
  batch = routing.selected.shape[:2]
  weight, tokens = None, jnp.float32(math.prod(batch))
  if token_mask is not None:
    weight = token_mask.astype(jnp.float32)[..., None]
    tokens = weight.sum()

  def total(x: jax.Array) -> jax.Array:
    return (x if weight is None else x * weight).sum((0, 1))

  factor = jnp.float32(budget.routed if form == "released" else 1)
  shared = jnp.broadcast_to(tokens, budget.shared)
  values = routing.selected, routing.shared_scores, routing.probs
  sums = total(jnp.concatenate([x.astype(jnp.float32) for x in values], -1))
  selected, scores = jnp.split(sums, [budget.routed])
  return RouterAux(
    tokens,
    jnp.concatenate([shared, selected]),
    jax.lax.stop_gradient(scores),
    jnp.where(jnp.arange(budget.num_heads) < budget.shared, 0.0, factor)
    * scores,
    routed=budget.top_k > 0,
  )


def all_heads_aux(num_heads: int) -> RouterAux:
  """Side values of a layer without a router (multi-head attention)."""
  return RouterAux(
    tokens=jnp.ones((), jnp.float32),
    counts=jnp.ones(num_heads, jnp.float32),
    scores=jnp.full(num_heads, 1 / num_heads, jnp.float32),
    balance=jnp.zeros(num_heads, jnp.float32),
    routed=False,
  )


def load_entropy(load: np.ndarray) -> np.ndarray:
  """Entropy of a layer's load, scaled to [0, 1].

  The loads of k heads per token, divided by k, are a distribution. Its entropy
  is log k at least, where every token selects the same k heads, which is 0
  here, and log R at most, where all heads are selected equally often, which is
  1 here.

  Args:
    load: [..., R] share of tokens that select each routed head; the sum over R
      is the number of heads that a token selects.

  Returns:
    [...] float64; NaN where no token was counted or none selects a head, and 1
    where tokens have no choice since they select all heads.
  """
  load = np.asarray(load, np.float64)
  selected = load.sum(-1)
  with np.errstate(divide="ignore", invalid="ignore"):
    share = load / selected[..., None]
    entropy = -np.where(share > 0, share * np.log(share), 0.0).sum(-1)
    least = np.log(selected)
    span = np.log(max(load.shape[-1], 1)) - least
    scaled = np.clip((entropy - least) / span, 0.0, 1.0)
  scaled = np.where(span > 1e-6, scaled, 1.0)
  return np.where(selected > 0, scaled, np.nan)
