"""Times decoding: the attention of one new token to a cache.

  python -m benchmarks.decode --lengths 1024 --batch 8

Shapes: B batch, M slots, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks.attention import (
  HeadOptions,
  Split,
  make_reference,
  random_active,
  run_heads,
)
from moh_jax.cli.command import option
from moh_jax.config.base import Count
from moh_jax.ops.attention import Form, cached_attention
from moh_jax.ops.cache import LayerCache, Slots, make_cache, write_cache
from moh_jax.ops.kernels import decode
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.target import target


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(HeadOptions):
  """Options of this benchmark; `lengths` counts the slots of the cache.

  Attributes:
    cache_dtype: dtype of the cached keys and values; without it the compute
      dtype.
  """

  lengths: tuple[Count, ...] = (1024, 4096)
  # "dense" reads the cache for every head, "kernel" for active heads only.
  implementations: tuple[Literal["dense", "kernel"], ...] | None = None
  cache_dtype: Literal["bfloat16", "float32"] | None = None
  modes: tuple[Literal["decode"], ...] = option("hidden", default=("decode",))

  FORMS = ("dense", "kernel")


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a table; 1 if a form is not exact or does not run."""
  return run_heads(__doc__, argv, DecodeOptions, "decode", splits, chosen_form)


def chosen_form(
  options: DecodeOptions, mode: str, length: int, share: float, name: str
) -> Form:
  """The form of the cache's attention.

  Raises:
    ValueError: it is impossible.
  """
  del mode, length
  needs = decode.unable(target(), options.head_dim)
  if name == "kernel" and needs:
    raise ValueError(f"--implementations kernel needs {needs}")
  return Form(name, packs=name != "dense" and share < 1)


def splits(options: DecodeOptions, _: str, length: int) -> Iterable[Split]:
  """Attention to a cache of all heads, and of each of the shares."""
  batch = options.batch
  q, cache, slots = _arrays(options, length)
  whole, _ = make_reference("forward")(q, *_keys_and_values(cache))
  for budget in (None, *options.budgets()):
    active = None
    if budget is not None:
      active = random_active(options.units(budget), batch, 1)
    yield Split(
      budget,
      evaluation=_evaluation,
      args=(q, cache, slots, active),
      expected=lambda active=active: (_gated(whole, active), ()),
    )


def _gated(out: jax.Array, active: ActiveHeads | None) -> jax.Array:
  """Outputs times gates, which are 1 where heads are active."""
  return out if active is None else out * active.mask[..., None]


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
    out = cached_attention(q, cache, slots, active, name)
    return _gated(out, active), ()

  return run


def _keys_and_values(cache: LayerCache) -> tuple[jax.Array, jax.Array]:
  """What a cache holds, [B, M, K, D] float32."""
  k, v = (x.astype(jnp.float32) for x in (cache.k, cache.v))
  return k.swapaxes(1, 2), v.swapaxes(1, 2)


if __name__ == "__main__":
  sys.exit(main())
