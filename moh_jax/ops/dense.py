"""Attention of every head, with all logits in memory at once.

The form for short sequences, and for accelerators where no kernel is used: XLA
fuses the steps.

Shapes: B batch, N queries, M keys (slots of a cache), n new tokens, H query
heads, K key/value heads, D head dim.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from moh_jax.ops.attention_forms import SHORT, AttentionCase, Call, Form
from moh_jax.ops.basics import einsum_float32, unnormalized_softmax
from moh_jax.ops.cache import LayerCache, Slots, merge_texts
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.target import on_one_device

# From so many tokens on, a CPU gains from leaving out hidden keys of causal
# attention, also where all logits would fit.
_LONG_CAUSAL = 256


def unable(case: AttentionCase) -> str:
  """See `Backend.unable`."""
  if case.is_small or _is_small_by_one(case):
    return ""
  return "logits that fit a device's caches or memory"


def _is_small_by_one(case: AttentionCase) -> bool:
  """Whether only the logits of one sequence are small."""
  one = dataclasses.replace(case, batch=1)
  short = case.on_cpu and case.one_device and case.queries < SHORT
  return not case.is_small and short and one.is_small


def suits(case: AttentionCase, *, packs: bool) -> bool:
  """See `Backend.suits`."""
  if packs or unable(case):
    return False
  if not case.on_cpu:
    return True
  if case.causal:
    return case.is_small and case.queries < _LONG_CAUSAL
  # Blocks are computed in float32, which all logits need not be.
  return case.queries < SHORT or case.dtype != "float32"


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  return Form("dense", one_by_one=_is_small_by_one(case))


def attend(call: Call, form: Form) -> jax.Array:
  """See `Backend.attend`."""
  return _one_by_one(call) if form.one_by_one else dense_attention(call)


def dense_attention(call: Call) -> jax.Array:
  """Softmax attention of every head through all logits, [B, H, N, M] float32.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  batch, queries, heads, dim = call.q.shape
  keys, groups = call.k.shape[1:3]
  mask = call.visible.mask(queries, keys)
  # On one device batch and key/value heads are one axis, which makes the CPU's
  # batched products twice as fast; a mesh that splits both needs them apart.
  lead = (batch * groups,) if on_one_device() else (batch, groups)
  # The queries of all heads that read the same keys are rows of one product.
  q = call.q.reshape(batch, queries, groups, -1, dim).transpose(0, 2, 3, 1, 4)
  q = q.reshape(*lead, -1, dim)
  k, v = (x.swapaxes(1, 2).reshape(*lead, keys, dim) for x in (call.k, call.v))
  # Autodiff does the same products for float32, and has forward mode too.
  arrays = (call.q, call.k, call.v)
  plain = all(x.dtype == jnp.float32 for x in arrays)
  multiply, mix = (_multiply, _mix) if plain else (_logits, _mix_values)
  logits = multiply(q, k)
  logits = logits.reshape(batch, heads, queries, keys) * call.scale
  if call.bias is not None:
    logits = logits + call.bias
  if mask is not None:
    logits = jnp.where(mask, logits, -jnp.inf)
  # Dividing after the product with the values saves one pass over the logits.
  masked = mask is not None or call.bias is not None
  weights, total, _ = unnormalized_softmax(logits, masked=masked)
  out = mix(weights.reshape(*q.shape[:-1], keys), v)
  out = out.reshape(batch, heads, queries, dim) / total
  return out.astype(v.dtype).swapaxes(1, 2)


def _one_by_one(call: Call) -> jax.Array:
  """`dense_attention` of one sequence of the batch after another.

  The logits of a sequence stay in a CPU's caches where those of the batch would
  not. Gradients compute them again, so that they are never all in memory.
  """
  shared = call.bias is None or call.bias.shape[0] == 1

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(arrays: tuple) -> jax.Array:
    *inputs, own, visible = jax.tree.map(lambda x: x[None], arrays)
    bias = call.bias if shared else own
    return dense_attention(Call(*inputs, visible, call.scale, bias))[0]

  own = None if shared else call.bias
  return jax.lax.map(attend, (call.q, call.k, call.v, own, call.visible))


def attend_to_cache(q: jax.Array, cache: LayerCache, slots: Slots) -> jax.Array:
  """Attention of new tokens to a cache, every head.

  Args:
    q: [B, n, H, D].
    cache: keys and values [B, K, M, D] or [B * K, M, D].
    slots: which slots each new token sees.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.
  """
  batch, new, heads, dim = q.shape
  *lead, length, _ = cache.k.shape
  groups = math.prod(lead) // batch
  dtype = q.dtype
  if cache.k_scale is None:  # keep a float32 cache in float32, not in q's dtype
    dtype = jnp.promote_types(dtype, cache.k.dtype)
  # One product per key/value head: its rows are the queries that read the head,
  # of all new tokens, r = n * H / K.
  grouped = q.reshape(batch, new, groups, -1, dim).transpose(0, 2, 1, 3, 4)
  grouped = grouped.reshape(*lead, -1, dim).astype(dtype)
  logits = einsum_float32("...rd,...md->...rm", grouped, cache.k.astype(dtype))
  if cache.k_scale is not None:
    logits = logits * cache.k_scale
  visible = jnp.repeat(slots.visible(new, length), heads // groups, axis=1)
  visible = jnp.repeat(visible[:, None], groups, axis=1).reshape(logits.shape)
  logits = jnp.where(visible, logits * dim**-0.5, -jnp.inf)
  weights, total, _ = unnormalized_softmax(logits, masked=True)
  if cache.v_scale is not None:
    weights = weights * cache.v_scale
  out = einsum_float32(
    "...rm,...md->...rd", weights.astype(dtype), cache.v.astype(dtype)
  )
  out = (out / total).astype(q.dtype)
  out = out.reshape(batch, groups, new, -1, dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(batch, new, heads, dim)


def attend_to_groups(
  q: jax.Array, cache: LayerCache, slots: Slots, active: ActiveHeads
) -> jax.Array:
  """`attend_to_cache` of one new token that reads the active groups alone.

  A branch for each key/value head slices the cache only where it is taken; what
  a loop over a list of heads slices, XLA copies first for CPUs.

  Args:
    q: [B, 1, H, D].
    cache: as for `attend_to_cache`.
    slots: as for `attend_to_cache`.
    active: all query heads of a key/value head, or none.

  Returns:
    [B, 1, H, D]; 0 for inactive heads.
  """
  batch, _, heads, dim = q.shape
  cache = merge_texts(cache)
  groups = cache.k.shape[0] // batch
  size = heads // groups
  mask = active.mask.reshape(batch, groups, size).any(-1)
  start = jnp.broadcast_to(slots.start, slots.first.shape)
  grouped = q.reshape(batch * groups, size, dim)

  def attend_one(text: jax.Array, group: int) -> jax.Array:
    def taken(q: jax.Array, cache: LayerCache) -> jax.Array:
      def part(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, text * groups + group, 1)

      own = Slots(start[text], slots.first[text][None])
      return attend_to_cache(part(q)[None], jax.tree.map(part, cache), own)[0]

    def left_out(q: jax.Array, cache: LayerCache) -> jax.Array:
      del cache
      return jnp.zeros((1, size, dim), q.dtype)

    return lax.cond(mask[text, group], taken, left_out, grouped, cache)

  def one_text(text: jax.Array) -> jax.Array:
    return jnp.concatenate([attend_one(text, group) for group in range(groups)])

  # Of one text the places in the cache are constants, which XLA reads faster.
  out = one_text(0) if batch == 1 else lax.map(one_text, jnp.arange(batch))
  return out.reshape(q.shape)


# Both products have float32 results, so their gradients arrive in float32. They
# are rounded to the inputs' dtype before the products of the backward pass:
# autodiff would multiply float32 by bfloat16, at a fraction of the speed.
def _multiply(q: jax.Array, k: jax.Array) -> jax.Array:
  """Multiplies q [..., n, D] and k [..., m, D] to float32 [..., n, m]."""
  return einsum_float32("...nd,...md->...nm", q, k)


_logits = jax.custom_vjp(_multiply)


def _logits_backward(saved: tuple, grad: jax.Array) -> tuple:
  q, k = saved
  grad = grad.astype(q.dtype)
  dq = jnp.einsum("...nm,...md->...nd", grad, k)
  return dq, jnp.einsum("...nm,...nd->...md", grad, q)


_logits.defvjp(lambda q, k: (_logits(q, k), (q, k)), _logits_backward)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Multiplies weights [..., n, m] and v [..., m, D] to float32 [..., n, D]."""
  return einsum_float32("...nm,...md->...nd", weights.astype(v.dtype), v)


_mix_values = jax.custom_vjp(_mix)


def _mix_forward(weights: jax.Array, v: jax.Array) -> tuple:
  weights = weights.astype(v.dtype)
  return einsum_float32("...nm,...md->...nd", weights, v), (weights, v)


def _mix_backward(saved: tuple, grad: jax.Array) -> tuple:
  weights, v = saved
  grad = grad.astype(v.dtype)
  dv = jnp.einsum("...nm,...nd->...md", weights, grad)
  return einsum_float32("...nd,...md->...nm", grad, v), dv


_mix_values.defvjp(_mix_forward, _mix_backward)
