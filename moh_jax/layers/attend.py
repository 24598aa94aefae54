"""Attention of the heads at work, on one device or each of a mesh.

Shapes: B batch, N tokens, H query heads.
"""

from typing import Any

import jax

from moh_jax.layers.partitioning import map_shards
from moh_jax.ops.attention import attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.routing import HeadBudget, RouterConfig


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
  """
  if gates is None or router.needs_all_heads:
    return None
  most = budget.active if top_k is None else budget.num_heads
  return ActiveHeads(gates != 0, most)


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  active: ActiveHeads | None,
  key_mask: jax.Array | None = None,
  segments: jax.Array | None = None,
  **options: Any,
) -> jax.Array:
  """`ops.attention.attention`, on every device's part of batch and heads.

  XLA splits plain products by itself; the table of active heads is made by
  each device for its own, so that nothing passes between them.
  """
  if options["implementation"] in ("auto", "dense"):
    return attention(
      q, k, v, active=active, key_mask=key_mask, segments=segments, **options
    )
  heads = ("batch", None, "heads", None)
  named = {
    "q": (q, heads),
    "k": (k, heads),
    "v": (v, heads),
    "mask": (None if active is None else active.mask, heads[:3]),
    "key_mask": (key_mask, ("batch", None)),
    "segments": (segments, ("batch", None)),
  }
  given = {name: pair for name, pair in named.items() if pair[0] is not None}

  def local(*arrays: jax.Array) -> jax.Array:
    parts = dict(zip(given, arrays))
    mask = parts.pop("mask", None)
    here = None if mask is None else ActiveHeads(mask, active.most)
    return attention(active=here, **parts, **options)

  arrays, names = zip(*given.values())
  return map_shards(local, arrays, names, heads)
