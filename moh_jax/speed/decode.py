"""Attention of one new token to a cache.

Shapes: B batch, M slots, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from moh_jax.ops.cache import LayerCache, make_cache, write_cache
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels.sizes import decode_tile
from moh_jax.ops.visible import Visible
from moh_jax.speed import compare, exactness
from moh_jax.speed.attention import attention_flops, random_active
from moh_jax.speed.compare import Variant, setting_of
from moh_jax.speed.options import DENSE_FORMS, HeadOptions, check_names
from moh_jax.speed.programs import compile_program, default_loops
from moh_jax.speed.report import Row

CACHE_DTYPES = ("float32", "bfloat16", "int8")


def _gated(
  q: jax.Array,
  cache: LayerCache,
  visible: jax.Array,
  active: ActiveHeads | None,
  implementation: str,
) -> jax.Array:
  """What a layer runs, with gates of one."""
  out = cached_attention(
    q, cache, visible, active=active, implementation=implementation
  )
  return out if active is None else out * active.mask[..., None]


@dataclasses.dataclass(frozen=True)
class DecodeOptions(HeadOptions):
  """Of one token more.

  Attributes:
    cache_dtype: of `CACHE_DTYPES`; None is the compute dtype.
  """

  lengths: tuple[int, ...] = (1024, 4096)
  cache_dtype: str | None = None

  # "dense" reads every head, "kernel" those at work.
  known_implementations: ClassVar[tuple[str, ...]] = ("dense", "kernel")

  def __post_init__(self):
    if self.cache_dtype is not None:
      check_names("cache_dtype", [self.cache_dtype], CACHE_DTYPES)
    super().__post_init__()

  def check_possible(self, implementation: str) -> None:
    """Raises a ValueError where the device or the cache rule one out."""
    super().check_possible(implementation)
    if implementation != "kernel":
      return
    if self.cache_dtype == "int8":
      raise ValueError(
        "--implementations kernel needs a --cache-dtype of floats, not int8"
      )
    try:
      decode_tile("gpu", self.head_dim, self.dtype)  # or a TPU's: the same dims
    except ValueError as error:
      raise ValueError(
        f"--head-dim {self.head_dim} is not for --implementations kernel: "
        f"{error}"
      ) from error


def measure(options: DecodeOptions, peak: float) -> list[Row]:
  """Compares gated attention to a cache with multi-head attention to it.

  Args:
    options: what to compare.
    peak: the device's matrix peak, FLOP/s.
  """
  rows = []
  for length in options.lengths:
    setting = setting_of(
      options, "decode", "decode", length, peak, units=options.batch
    )
    rows += compare.measure(setting, _variants(options, length))
  return rows


def _variants(options: DecodeOptions, length: int) -> list[Variant]:
  batch, heads, dim = options.batch, options.heads, options.head_dim
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (batch, 1, heads, dim), options.dtype)
  cache = make_cache(
    batch,
    options.num_kv_heads,
    length,
    dim,
    options.cache_dtype or options.dtype,
  )
  new = (
    jax.random.normal(key, (batch, length, options.num_kv_heads, dim))
    for key in keys[1:]
  )
  cache = write_cache(cache, *new, jnp.int32(0))
  visible = jnp.ones((batch, 1, length), bool)
  expected = _reference(q, cache)
  variants = []
  for budget in (None, *options.budgets()):
    active, gated = None, expected
    names = [name for name in options.compared if name in DENSE_FORMS]
    if budget is not None:
      active, names = random_active(budget, batch, 1), options.compared
      gated = expected * active.mask[..., None]
    share = 1.0 if budget is None else budget.share
    for name in names:
      program = compile_program(
        functools.partial(_gated, implementation=name),
        q,
        cache,
        visible,
        active,
        loops=default_loops(),
      )
      variants.append(
        Variant(
          name,
          share,
          program,
          budget is None,
          # A new token sees every slot.
          attention_flops(round(batch * heads * share), length, dim),
          exactness.compare((program.run(), ()), (gated, ())),
        )
      )
  return variants


@jax.jit
def _reference(q: jax.Array, cache: LayerCache) -> jax.Array:
  """The dense form in float32, on the keys and values of a cache."""
  k, v = (x.astype(jnp.float32) for x in (cache.k, cache.v))
  if cache.k_scale is not None:
    k, v = k * cache.k_scale[..., None], v * cache.v_scale[..., None]
  with jax.default_matmul_precision("highest"):
    return dense_attention(
      q.astype(jnp.float32),
      k.swapaxes(1, 2),
      v.swapaxes(1, 2),
      None,
      Visible(),
      q.shape[-1] ** -0.5,
    )
