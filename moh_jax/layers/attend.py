"""Attention of the heads at work, on one device or each of a mesh.

Shapes: B batch, N tokens, H query heads, D head dim.
"""

import functools
from collections.abc import Callable

import jax

from moh_jax.layers.partitioning import map_shards
from moh_jax.ops.attention import attention
from moh_jax.ops.attention_forms import choose_cached_form
from moh_jax.ops.cache import LayerCache
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.routing import HeadBudget, RouterConfig

_HEADS = ("batch", None, "heads", None)  # [B, N, H, D]


def active_heads(
  gates: jax.Array | None,
  budget: HeadBudget,
  router: RouterConfig,
  top_k: jax.Array | None = None,
) -> ActiveHeads | None:
  """The heads whose outputs count.

  Args:
    gates: [B, N, H] of the router, or None where every head weighs one.
    budget: the layer's head split.
    router: the kind of the router.
    top_k: [] int32 routed heads per token in place of the budget's, which is
      not known before the program runs.

  Returns:
    The heads with a gate, or None where all are computed: without a router,
    whatever the gates, and where gradients need every output.
  """
  if gates is None or router.needs_all_heads:
    return None
  most = most_active_heads(budget, router, any_top_k=top_k is not None)
  return ActiveHeads(gates != 0, most)


def most_active_heads(
  budget: HeadBudget, router: RouterConfig, *, any_top_k: bool
) -> int:
  """Heads that a layer computes for one token at most.

  Args:
    budget: the layer's head split.
    router: the kind of the router.
    any_top_k: whether the routed heads per token change while it runs.
  """
  if any_top_k or router.needs_all_heads:
    return budget.num_heads
  return budget.active


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  active: ActiveHeads | None,
  implementation: str,
  causal: bool = False,
  key_mask: jax.Array | None = None,
  segments: jax.Array | None = None,
) -> jax.Array:
  """`ops.attention.attention`, on every device's part of batch and heads.

  XLA splits plain products by itself; the table of active heads is made by
  each device for its own, so that nothing passes between them.

  Args:
    q: [B, N, H, D].
    k: [B, M, K, D].
    v: [B, M, K, D].
    active: the heads at work; None is every head.
    implementation: see `attention`, as all that follows.
    causal: whether later keys are hidden.
    key_mask: [B, M] bool.
    segments: [B, N] int32.

  Returns:
    [B, N, H, D] in the dtype of v.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  options = {"causal": causal, "implementation": implementation}
  if implementation in ("auto", "dense"):
    return attention(
      q, k, v, active=active, key_mask=key_mask, segments=segments, **options
    )
  arrays = {
    "q": (q, _HEADS),
    "k": (k, _HEADS),
    "v": (v, _HEADS),
    "key_mask": (key_mask, ("batch", None)),
    "segments": (segments, ("batch", None)),
  }
  return _on_parts(functools.partial(attention, **options), arrays, active)


def attend_to_cache(
  q: jax.Array,
  cache: LayerCache,
  visible: jax.Array,
  *,
  active: ActiveHeads | None,
  implementation: str,
) -> jax.Array:
  """`ops.cached_attention.cached_attention`, likewise.

  Args:
    q: [B, n, H, D] of new tokens.
    cache: with their own keys and values in it.
    visible: [B, n, M] bool, the slots that each may see.
    active: the heads at work; None is every head.
    implementation: see `cached_attention`.

  Returns:
    [B, n, H, D] in the dtype of q.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  form = choose_cached_form(
    implementation, new=q.shape[1], quantized=cache.k_scale is not None
  )
  if form == "dense":
    return cached_attention(q, cache, visible, implementation=form)

  def local(q, k, v, visible, active):
    return cached_attention(
      q, LayerCache(k, v), visible, active=active, implementation=form
    )

  stored = ("batch", "heads", None, None)
  arrays = {
    "q": (q, _HEADS),
    "k": (cache.k, stored),
    "v": (cache.v, stored),
    "visible": (visible, ("batch", None, None)),
  }
  return _on_parts(local, arrays, active)


def _on_parts(
  function: Callable[..., jax.Array],
  arrays: dict[str, tuple[jax.Array | None, tuple[str | None, ...]]],
  active: ActiveHeads | None,
) -> jax.Array:
  """Runs a form of attention on every device's part.

  By each device alone: Mosaic's kernels are not for compilers that split them.

  Args:
    function: (**arrays, active=) -> [B, N, H, D].
    arrays: its arguments, with the names of their dimensions; what is None is
      left out.
    active: the heads at work.
  """
  mask = None if active is None else active.mask
  named = arrays | {"mask": (mask, _HEADS[:3])}
  given = {name: pair for name, pair in named.items() if pair[0] is not None}

  def local(*parts: jax.Array) -> jax.Array:
    own = dict(zip(given, parts))
    chosen = own.pop("mask", None)
    here = None if chosen is None else ActiveHeads(chosen, active.max_per_token)
    return function(active=here, **own)

  values, names = zip(*given.values())
  return map_shards(local, values, names, _HEADS, whole_mesh=True)
