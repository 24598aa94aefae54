"""Benchmark of decoding: attention of one new token to a cache.

Shapes: B batch, M slots, H query heads, K key/value heads, D head dim.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention_forms import Form
from moh_jax.ops.cache import LayerCache, Slots, make_cache, write_cache
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.speed import compare
from moh_jax.speed.attention import (
  attention_flops,
  make_reference,
  random_active,
)
from moh_jax.speed.compare import Contest, Variant
from moh_jax.speed.options import DecodeOptions
from moh_jax.speed.programs import is_absent, make_arrays
from moh_jax.speed.report import Row


def decode_bytes(options: DecodeOptions, slots: int, read: float) -> float:
  """Bytes of the cache that one new token per text reads.

  Args:
    options: options of `bench decode`.
    slots: slots of the cache, all visible.
    read: key/value heads that are read over all of them.
  """
  dtype = options.cache_dtype or options.dtype
  scale = 4 if dtype == "int8" else 0  # a float32 for each slot and head
  head = slots * (options.head_dim * jnp.dtype(dtype).itemsize + scale)
  return 2 * options.batch * options.num_kv_heads * head * read


def measure(options: DecodeOptions) -> list[Row]:
  """Compares gated attention to a cache with multi-head attention to it.

  Args:
    options: options of `bench decode`.
  """
  variants = functools.partial(_variants, options)
  return compare.measure_heads(options, "decode", variants)


def _variants(options: DecodeOptions, mode: str, length: int) -> list[Variant]:
  del mode  # there is only one
  batch, heads, dim = options.batch, options.heads, options.head_dim
  q, cache, slots = make_arrays(lambda: _arrays(options, length))
  expected = None
  if not is_absent():
    reference = make_reference("forward")
    expected, _ = reference(q, *_keys_and_values(cache))
  contests = []
  for budget in (None, *options.budgets()):
    active, share = None, 1.0
    if budget is not None:
      active = make_arrays(lambda b=budget: random_active(b, batch, 1))
      share = budget.share
    contests.append(
      Contest(
        budget,
        form=lambda name, budget=budget: Form(
          name, packs=name == "kernel" and budget is not None
        ),
        evaluation=_evaluation,
        args=(q, cache, slots, active),
        # A new token sees every slot, so the mode is not causal.
        flops=attention_flops(round(batch * heads * share), length, dim),
        moved=lambda packs, budget=budget: decode_bytes(
          options, length, _read(options, budget) if packs else 1.0
        ),
        expected=lambda _, active=active: (_gated(expected, active), ()),
      )
    )
  return compare.compile_forms(options, contests)


def _gated(out: jax.Array, active: ActiveHeads | None) -> jax.Array:
  """Outputs times gates, which are 1 where heads are active."""
  return out if active is None else out * active.mask[..., None]


def _read(options: DecodeOptions, budget: HeadBudget) -> float:
  """Expected share of the key/value heads that some active head reads."""
  groups = options.num_kv_heads
  each = options.heads // groups
  always = math.ceil(budget.shared / each)  # read by a shared head
  others = max(0, budget.routed - each)
  unread = math.comb(others, budget.top_k) / math.comb(
    budget.routed, budget.top_k
  )
  return 1 - (1 - always / groups) * unread


def _arrays(options: DecodeOptions, length: int) -> tuple:
  """Queries, a full cache, and the slots that are visible: all."""
  batch, heads, dim = options.batch, options.heads, options.head_dim
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (batch, 1, heads, dim), options.dtype)
  groups, dtype = options.num_kv_heads, options.cache_dtype or options.dtype
  cache = make_cache(batch, groups, length, dim, dtype)
  shape = batch, length, groups, dim
  new = (jax.random.normal(key, shape) for key in keys[1:])
  cache = write_cache(cache, *new, jnp.int32(0))
  return q, cache, Slots(jnp.int32(length - 1), jnp.zeros(batch, jnp.int32))


def _evaluation(name: str) -> Callable:
  """Makes the function (q, cache, slots, active) -> (outputs, ())."""

  def run(q, cache, slots, active):
    out = cached_attention(q, cache, slots, active=active, implementation=name)
    return _gated(out, active), ()

  return run


def _keys_and_values(cache: LayerCache) -> tuple[jax.Array, jax.Array]:
  """What a cache holds, [B, M, K, D] float32."""
  k, v = (x.astype(jnp.float32) for x in (cache.k, cache.v))
  if cache.k_scale is not None:
    k, v = k * cache.k_scale.mT, v * cache.v_scale.mT
  return k.swapaxes(1, 2), v.swapaxes(1, 2)
