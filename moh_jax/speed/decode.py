"""Benchmark of decoding: attention of one new token to a cache.

Shapes: B batch, M slots, H query heads, K key/value heads, D head dim.
"""

import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.cache import LayerCache, Slots, make_cache, write_cache
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.speed import compare
from moh_jax.speed.attention import (
  attention_flops,
  make_reference,
  random_active,
)
from moh_jax.speed.compare import Variant
from moh_jax.speed.options import DecodeOptions
from moh_jax.speed.report import Row


def _gated(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  active: ActiveHeads | None,
  implementation: str,
) -> tuple[jax.Array, tuple]:
  """Returns (output, no gradients) of gated attention; active gates are 1."""
  out = cached_attention(
    q, cache, slots, active=active, implementation=implementation
  )
  return out if active is None else out * active.mask[..., None], ()


def measure(options: DecodeOptions, peak: float) -> list[Row]:
  """Compares gated attention to a cache with multi-head attention to it.

  Args:
    options: options of `bench decode`.
    peak: the device's matrix peak, FLOP/s.
  """
  variants = functools.partial(_variants, options)
  return compare.measure_heads(options, "decode", variants, peak)


def _variants(options: DecodeOptions, mode: str, length: int) -> list[Variant]:
  del mode  # there is only one
  batch, heads, dim = options.batch, options.heads, options.head_dim
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (batch, 1, heads, dim), options.dtype)
  groups, dtype = options.num_kv_heads, options.cache_dtype or options.dtype
  cache = make_cache(batch, groups, length, dim, dtype)
  shape = batch, length, groups, dim
  new = (jax.random.normal(key, shape) for key in keys[1:])
  cache = write_cache(cache, *new, jnp.int32(0))
  slots = Slots(jnp.int32(length - 1), jnp.zeros(batch, jnp.int32))
  reference = make_reference("forward")
  expected, _ = reference(q, *_keys_and_values(cache))
  variants = []
  for budget in (None, *options.budgets()):
    active, gated, share = None, expected, 1.0
    if budget is not None:
      active, share = random_active(budget, batch, 1), budget.share
      gated = expected * active.mask[..., None]
    variants += compare.compile_forms(
      options,
      budget,
      lambda name: functools.partial(_gated, implementation=name),
      (q, cache, slots, active),
      # A new token sees every slot, so the mode is not causal.
      flops=attention_flops(round(batch * heads * share), length, dim),
      expected=(gated, ()),
    )
  return variants


def _keys_and_values(cache: LayerCache) -> tuple[jax.Array, jax.Array]:
  """What a cache holds, [B, M, K, D] float32."""
  k, v = (x.astype(jnp.float32) for x in (cache.k, cache.v))
  if cache.k_scale is not None:
    k, v = k * cache.k_scale.mT, v * cache.v_scale.mT
  return k.swapaxes(1, 2), v.swapaxes(1, 2)
