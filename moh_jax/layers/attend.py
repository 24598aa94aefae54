"""Attention that skips inactive heads, on one device or on a mesh.

Shapes: B batch, N tokens, H query heads, K key/value heads, D head dim.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.layers.partitioning import axes_of, constrain, map_shards
from moh_jax.layers.router import HeadChoice
from moh_jax.ops import attention as ops
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.call import Call
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.placement import HeadPlacement, kv_repeats
from moh_jax.ops.target import target

_HEADS = ("batch", None, "heads", None)  # [B, N, H, D]
_ATTENDED = ("batch", None, "attended_heads", None)
_BIAS = ("attended_heads", None, None)  # [H, N, M]


def implementation_of(layer: nn.Module) -> str:
  """The form that a layer asks for, by its attribute `implementation`.

  While parameters are made it is "auto": they are the same for all forms, and
  any device can make them, to plan, convert or restore. An unknown name stays:
  it is refused later.
  """
  makes = layer.is_initializing() and layer.implementation in IMPLEMENTATIONS
  return "auto" if makes else layer.implementation


def active_heads(
  gates: jax.Array | None,
  budget: HeadBudget,
  router: RouterConfig,
  choice: HeadChoice | None = None,
  placement: HeadPlacement | None = None,
  kv_heads: int | None = None,
) -> ActiveHeads | None:
  """Finds the heads that attention must compute for each token.

  Args:
    gates: [B, N, H] gates of the router, or None where every head weighs one.
    budget: the layer's head split.
    router: the kind of the router.
    choice: runtime overrides of the budget, whose values are not known when the
      program is compiled.
    placement: how devices hold the heads; the gates are in its order.
    kv_heads: K; None is one per query head.

  Returns:
    The heads whose gate is not 0, or None where all must be computed: without a
    router, or where gradients need every head's output.
  """
  if gates is None or router.needs_all_heads:
    return None
  choice, units = choice or HeadChoice(), Units.of(budget, router, kv_heads)
  make = functools.partial(ActiveHeads, gates != 0)
  if choice.top_k is not None or router.varies:
    return make(budget.num_heads)
  if placement is None:
    return make(budget.active, parts=units.parts)
  if choice.order is not None:  # any heads may be shared, also all of a device
    return make(budget.active, budget.active / placement.total)
  expected, most = placement.active(budget)
  return make(most, expected)


def attend_on_mesh(call: Call, implementation: str) -> jax.Array:
  """Runs `ops.attention.attend`, on a mesh on each device's own heads.

  Every device chooses the form for its own part of the batch and the heads, and
  makes the table of its active heads, so that devices exchange nothing. That is
  under shard_map, since XLA's partitioner cannot split a Pallas call.

  Devices that share the tokens of a sequence exchange them before, each giving
  its tokens of other devices' heads for the other tokens of its own heads, and
  back afterwards (arXiv:2309.14509). So any form runs on whole sequences, also
  causal, and no device has more work than another. Key/value heads of which
  there are too few are repeated.

  Args:
    call: arrays of the whole mesh; a bias is [H, N, M]. Where the active heads
      are as many of each key/value head, devices get the queries of these
      alone.
    implementation: see `ops.attention.attention`.

  Returns:
    [B, N, H, D] in the dtype of v.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """

  def local(q, k, v, visible, bias, active):
    own = Call(q, k, v, visible, call.scale, bias, active)
    return ops.attend(own, implementation)

  def attend(q: jax.Array, active: ActiveHeads | None) -> jax.Array:
    tokens = "batch", "tokens", "heads", None
    q, k, v = (constrain(x, *tokens) for x in (q, call.k, call.v))
    heads, kv_heads = q.shape[2], k.shape[2]
    devices = math.prod(axes_of("attended_heads", heads).values())
    repeats = kv_repeats(kv_heads, devices)
    if repeats > 1 and heads % (kv_heads * repeats) == 0:
      # All tokens first: from there each device takes its heads without
      # exchange.
      k, v = (
        jnp.repeat(constrain(x, *_HEADS), repeats, axis=2) for x in (k, v)
      )
    arrays = q, k, v, call.visible, call.bias, active
    names = (*(_ATTENDED,) * 3, _ATTENDED[:2], _BIAS, _ATTENDED[:3])
    out = map_shards(local, arrays, names, _ATTENDED, whole_mesh=True)
    return constrain(out, *tokens)

  return attend_picked(attend, call.q, call.active)


def attend_to_cache(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  active: ActiveHeads | None,
  implementation: str,
) -> jax.Array:
  """Runs `ops.attention.cached_attention`, on a mesh as `attend_on_mesh` does.

  Args:
    q: [B, n, H, D] queries of new tokens.
    cache: keys and values, those of the new tokens among them.
    slots: which slots each new token sees.
    active: the heads that tokens use; None is every head.
    implementation: see `ops.attention.choose_cached_form`.

  Returns:
    [B, n, H, D] in the dtype of q.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  form = ops.choose_cached_form(
    implementation, target(), new=q.shape[1], head_dim=q.shape[-1]
  )
  local = functools.partial(ops.cached_attention, implementation=implementation)

  def attend(q: jax.Array, active: ActiveHeads | None) -> jax.Array:
    if form == "dense":  # the compiler splits it, also caches of merged texts
      return local(q, cache, slots)
    start = jnp.broadcast_to(slots.start, slots.first.shape)
    arrays = q, cache, Slots(start, slots.first), active
    names = _HEADS, ("batch", "heads", None, None), ("batch",), _HEADS[:3]
    return map_shards(local, arrays, names, _HEADS, whole_mesh=True)

  return attend_picked(attend, q, active)


def attend_picked(
  attend: Callable[[jax.Array, ActiveHeads | None], jax.Array],
  q: jax.Array,
  active: ActiveHeads | None,
) -> jax.Array:
  """Attention with the queries of active heads alone, if heads have parts.

  Where a token uses as many query heads of every key/value head, j for each,
  its queries are j * K heads that read the same keys and values: attention to
  them is stock attention, on j * K / H of the work, with static shapes and no
  table. For instance, of 2 key/value heads with 3 query heads each, a token
  uses heads 0 and 2, and 3 and 5; they become heads 0, 1 and 2, 3.

  Where a token uses fewer than j heads of a key/value head, others have the
  rest of the places. So of G = H / K heads, head i can have the places from
  i + j - G to i.

  Args:
    attend: maps queries and their active heads to outputs of the same shape.
      Queries without gaps are [B, N, K * j, D], with None: all are active.
    q: [B, N, H, D].
    active: the heads that tokens use; of those with one part `attend` gets all
      queries.

  Returns:
    [B, N, H, D]. Heads without a place are 0, and all heads of a token with
    more than j heads of a key/value head NaN.
  """
  if active is None or active.parts == 1:
    return attend(q, active)
  *lead, heads, dim = q.shape
  parts, size = active.parts, heads // active.parts
  count = min(heads, active.max_per_token) // parts
  mask = active.mask.reshape(*lead, parts, size)
  used = mask.sum(-1, dtype=jnp.int32)
  places, before, missing = [], jnp.zeros_like(used), count - used
  for head in range(size):
    fills = ~mask[..., head] & (missing > 0)
    has = (mask[..., head] | fills) & (before < count)
    places.append(jnp.where(has, before, size))
    before, missing = before + has, missing - fills

  def where(head: int, place: int, x: jax.Array) -> jax.Array:
    """[B, N, K, D] where the head has the place, else 0."""
    return jnp.where((places[head] == place)[..., None], x, 0)

  q = q.reshape(*lead, parts, size, dim)
  picked = [
    sum(
      where(head, place, q[..., head, :])
      for head in range(place, place + size - count + 1)
    )
    for place in range(count)
  ]
  picked = jnp.stack(picked, axis=-2).reshape(*lead, parts * count, dim)
  # Else XLA picks again wherever attention reads them.
  out = attend(jax.lax.optimization_barrier(picked), None)
  out = jax.lax.optimization_barrier(out).reshape(*lead, parts, count, dim)
  spread = [
    sum(
      where(head, place, out[..., place, :])
      for place in range(max(0, head + count - size), min(head + 1, count))
    )
    for head in range(size)
  ]
  out = jnp.stack(spread, axis=-2).reshape(*lead, heads, dim)
  wrong = (used > count).any(-1)
  return jnp.where(wrong[..., None, None], jnp.nan, out)
