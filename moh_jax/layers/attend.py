"""Attention that skips inactive heads, on one device or on a mesh.

Shapes: B batch, N tokens, H query heads, D head dim.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.layers.partitioning import axes_of, constrain, map_shards
from moh_jax.layers.router import HeadChoice
from moh_jax.ops import attention as ops
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.picked import attend_picked
from moh_jax.ops.placement import HeadPlacement, kv_repeats
from moh_jax.ops.target import target

_HEADS = ("batch", None, "heads", None)  # [B, N, H, D]
_ATTENDED = ("batch", None, "attended_heads", None)
_EVERYTHING = Visible()
_BIAS = ("attended_heads", None, None)  # [H, N, M]


def implementation_of(layer: nn.Module) -> str:
  """The form that a layer asks for, by its attribute `implementation`.

  While parameters are made it is "auto": they are the same for all forms, and
  any device can make them, to plan, convert or restore. Unknown names stay.
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
    return make(budget.active, placement.mean_active(budget))
  expected = max(placement.expected_active(budget))
  return make(placement.most_active(budget), expected)


def attend_on_mesh(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  active: ActiveHeads | None,
  implementation: str,
  visible: Visible = _EVERYTHING,
  bias: jax.Array | None = None,
  scale: float | None = None,
) -> jax.Array:
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
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys.
    v: [B, M, K, D] values.
    active: the heads that tokens use; None is every head. Where they are as
      many of each key/value head, devices get the queries of these alone.
    implementation: see `ops.attention.attention`, as for all arguments below.
    visible: which keys a query sees.
    bias: [H, N, M] added to the scaled logits.
    scale: factor of the logits; None is D ** -0.5.

  Returns:
    [B, N, H, D] in the dtype of v.

  Raises:
    ValueError: the implementation is unknown or cannot do this.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  if active is not None and active.parts > 1:
    rest = {
      "visible": visible,
      "scale": scale,
      "implementation": implementation,
    }
    run = functools.partial(attend_on_mesh, k=k, v=v, active=None, **rest)
    return attend_picked(run, q, active, bias)

  def local(q, k, v, visible, bias, active):
    call = Call(q, k, v, visible, scale, bias, active)
    return ops.attend(call, implementation)

  q, k, v = (constrain(x, "batch", "tokens", "heads", None) for x in (q, k, v))
  heads, kv_heads = q.shape[2], k.shape[2]
  devices = math.prod(axes_of("attended_heads", heads).values())
  repeats = kv_repeats(kv_heads, devices)
  if repeats > 1 and heads % (kv_heads * repeats) == 0:
    # All tokens first: from there each device takes its heads without exchange.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
  arrays = (q, k, v, visible, bias, active)
  names = (*(_ATTENDED,) * 3, _ATTENDED[:2], _BIAS, _ATTENDED[:3])
  out = map_shards(local, arrays, names, _ATTENDED, whole_mesh=True)
  return constrain(out, "batch", "tokens", "heads", None)


def attend_to_cache(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  *,
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
  how = {"implementation": implementation}
  if active is not None and active.parts > 1:
    rest = {"cache": cache, "slots": slots, "active": None, **how}
    return attend_picked(functools.partial(attend_to_cache, **rest), q, active)
  form = ops.choose_cached_form(
    implementation, target(), new=q.shape[1], head_dim=q.shape[-1]
  )
  if form == "dense":  # the compiler splits it, also caches of merged texts
    return ops.cached_attention(q, cache, slots, **how)
  slots = Slots(jnp.broadcast_to(slots.start, slots.first.shape), slots.first)
  local = functools.partial(ops.cached_attention, **how)
  stored = ("batch", "heads", None, None)
  names = (_HEADS, stored, ("batch",), _HEADS[:3])
  return map_shards(
    local, (q, cache, slots, active), names, _HEADS, whole_mesh=True
  )
