"""Key/value caches: what is stored, attention to it, and its kernels."""

import dataclasses
import functools
import itertools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.ops.attention import attention, cached_attention
from moh_jax.ops.cache import (
  LayerCache,
  Slots,
  make_cache,
  merge_texts,
  split_texts,
  write_cache,
)
from moh_jax.ops.dense import cached_dense_attention
from moh_jax.ops.kernels import decode
from moh_jax.ops.kernels.attention import Tile
from moh_jax.ops.pairs import ActiveHeads
from tests.ops import devices

B, K, M, D = 2, 2, 8, 6
DTYPES = ("float32", "bfloat16")
write = jax.jit(write_cache)


def vectors(
  tokens: int, heads: int = K, seed: int = 0, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
  """Random [B, tokens, heads, D]."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(B, tokens, heads, D)), dtype)


def filled(dtype: str = "float32", tokens: int = M) -> LayerCache:
  """A cache with random keys and values in its first slots."""
  k, v = vectors(tokens, seed=1), vectors(tokens, seed=2)
  return write(make_cache(B, K, M, D, dtype), k, v, jnp.int32(0))


def stored(cache: LayerCache, name: str) -> np.ndarray:
  """Keys or values as floats, [B, M, K, D]."""
  return np.asarray(getattr(cache, name), np.float32).swapaxes(1, 2)


class SlotsTest(parameterized.TestCase):
  @parameterized.parameters(([3, 3],), (3,))
  def test_tokens_see_their_text_up_to_themselves(self, start):
    slots = Slots(jnp.asarray(start), jnp.asarray([0, 4]))
    expected = [
      [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]],
      [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]],
    ]
    np.testing.assert_array_equal(slots.visible(2, 6), expected)


class WriteCacheTest(parameterized.TestCase):
  @parameterized.product(dtype=DTYPES, slot=(0, 6))
  def test_writes_its_slots_and_no_other(self, dtype, slot):
    before = filled(dtype)
    new = vectors(2, seed=3), vectors(2, seed=4)
    # Texts may have slots of their own.
    for slots in (slot, slot), (slot, 3):
      at = jnp.int32(slot) if slots[0] == slots[1] else jnp.asarray(slots)
      after = write(before, *new, at)
      chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
      for name, x in zip("kv", new):
        expected = stored(before, name).copy()
        for text, first in enumerate(slots):
          expected[text, first : first + 2] = x[text].astype(dtype)
        np.testing.assert_array_equal(stored(after, name), expected)


_attend = jax.jit(cached_attention, static_argnames="implementation")
_dense = jax.jit(attention, static_argnames="causal")


def _slots(new, seen):
  """The last of `new` tokens sees the slots up to `seen`, the others fewer."""
  return Slots(jnp.asarray(seen) - new, jnp.zeros(2, jnp.int32))


class CachedAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    *((case, "float32", jnp.float32)
      for case in ((2, 1, 8), (6, 3, 3), (6, 1, 3))),
    *itertools.product(
      ((4, 2, 5),), ("bfloat16",), (jnp.float32, jnp.bfloat16)
    ),
  )  # fmt: skip
  def test_equals_dense_attention_to_what_is_stored(self, case, dtype, q_dtype):
    (heads, new, seen), cache = case, filled(dtype)
    q = vectors(new, heads, dtype=q_dtype)
    k, v = (jnp.asarray(stored(cache, name)[:, :seen]) for name in "kv")
    out = _attend(q, cache, _slots(new, seen), None, "dense")
    chex.assert_shape(out, q.shape)
    chex.assert_type(out, q_dtype)
    expected = _dense(q.astype(jnp.float32), k, v, causal=True)
    atol = 2e-6 if dtype == "float32" else 3e-6
    atol = atol if q_dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=atol)

  @parameterized.parameters((3, "dense"), ((4, 2), "dense"), (3, "kernel"))
  def test_texts_and_heads_may_be_one_axis(self, slot, form):
    before = filled(tokens=4)
    new = vectors(1, seed=3), vectors(1, seed=4), jnp.asarray(slot)
    after, merged = write(before, *new), write(merge_texts(before), *new)
    chex.assert_shape(merged.k, (B * K, M, D))
    chex.assert_trees_all_equal(split_texts(merged, B), after)
    q, slots = vectors(1, 2 * K), Slots(jnp.asarray(slot), jnp.array([0, 1]))
    outs = [_attend(q, cache, slots, None, form) for cache in (after, merged)]
    np.testing.assert_allclose(*outs, atol=1e-6)

  def test_more_heads_than_the_bound_give_nan_in_their_text(self):
    cache = filled()
    q, slots = vectors(1, 4), _slots(1, 5)
    mask = np.arange(4) <= 3 * (np.arange(B) == 0)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), 1)
    out = _attend(q, cache, slots, active, "kernel")
    self.assertTrue(np.isnan(out[0]).any())
    expected = jnp.where(
      mask[..., None], _attend(q, cache, slots, None, "dense"), 0
    )
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)


@dataclasses.dataclass(frozen=True)
class _Case:
  """Shapes, what is visible, and which heads are active."""

  heads: int = 4
  kv_heads: int = 4
  slots: int = 40
  head_dim: int = 24
  choice: str | tuple | None = "random"  # heads of each text; None is no table
  seen: tuple[tuple[int, int], ...] = ((13, 37), (0, 31))  # first, end of texts

  def arrays(self, dtype=jnp.float32, cache_dtype=None):
    """Queries and the cache."""
    rng, batch = np.random.default_rng(0), len(self.seen)
    stored = batch, self.kv_heads, self.slots, self.head_dim
    q = rng.normal(size=(batch, 1, self.heads, self.head_dim))
    k, v = rng.normal(size=(2, *stored))
    k, v = (jnp.asarray(x, cache_dtype or dtype) for x in (k, v))
    return jnp.asarray(q, dtype), LayerCache(k, v)

  def seen_slots(self) -> Slots:
    first, end = (jnp.asarray(x, jnp.int32) for x in zip(*self.seen))
    return Slots(end - 1, first)

  def read(self) -> jax.Array:
    """[B, 1 or K, M, 1] bool, the slots and heads that texts need."""
    seen = self.seen_slots().visible(1, self.slots)[..., None]
    if (active := self.active()) is None:
      return seen
    used = active.mask.reshape(len(seen), self.kv_heads, -1).any(-1)
    return seen & used[..., None, None]

  def active(self) -> ActiveHeads | None:
    if self.choice is None:
      return None
    mask = np.zeros((len(self.seen), 1, self.heads), bool)
    if self.choice == "random":
      mask = np.random.default_rng(2).random(mask.shape) < 0.5
      mask[..., -1] = False  # one head that nobody chose
      return ActiveHeads(jnp.asarray(mask), self.heads)
    for text, heads in enumerate(self.choice):
      mask[text, 0, list(heads)] = True
    return ActiveHeads(jnp.asarray(mask), max(map(len, self.choice)) or 1)


_LONG = ((13, 161), (70, 75), (0, 200), (192, 193))
_CASES = {
  "padding": _Case(),
  "many_splits": _Case(slots=200, head_dim=64, seen=_LONG),
  "one_slot": _Case(slots=1, head_dim=16, seen=((0, 1), (0, 1))),
  "text_that_begins_later": _Case(seen=((39, 2), (0, 37))),
  "first_text_chose_nothing": _Case(choice=((), (3,))),
  "grouped": _Case(heads=6, kv_heads=2, head_dim=80),
  "many_queries_of_a_head": _Case(70, 1, 16, seen=((2, 15),)),
  "many_queries_of_a_wide_head": _Case(18, 1, 16, 136, seen=((2, 15),)),
  "all_heads": _Case(4, 2, 160, 128, ((0, 1, 2, 3),) * 2, ((0, 160), (5, 96))),
  "no_table": _Case(choice=None),
  "few": _Case(heads=6, kv_heads=6, choice=((0, 1), (4,))),
}


def _reference(case: _Case, q, cache) -> jax.Array:
  """The dense form in float32, 0 for heads that are not active."""
  q, cache = jax.tree.map(lambda x: x.astype(jnp.float32), (q, cache))
  out = cached_dense_attention(q, cache, case.seen_slots())
  active = case.active()
  return out if active is None else out * active.mask[..., None]


def _decode(case, q, cache, interpret=True):
  heads = case.seen_slots(), case.active()
  return decode.decode_attention(q, cache, *heads, interpret=interpret)


@functools.partial(jax.jit, static_argnums=0)
def _kernel(case, q, cache):
  """With tiles of 16 slots, and splits of at least as many."""
  tiles = {size: {512: Tile(16, 16)} for size in (2, 4)}
  with mock.patch.multiple(decode, TILES=tiles, _MIN_SLOTS=16):
    return _decode(case, q, cache)


class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(
    *((name, jnp.float32, jnp.float32, 2e-6) for name in _CASES),
    ("grouped", jnp.bfloat16, jnp.bfloat16, 1e-2),
    # The wider of both: nothing is rounded but the result.
    ("grouped", jnp.float32, jnp.float16, 2e-6),
  )
  @pytest.mark.integration
  def test_equals_the_dense_form(self, name, dtype, cache_dtype, atol):
    case = _CASES[name]
    q, cache = case.arrays(dtype, cache_dtype)
    # Neither slots that no token sees nor heads that none chose are read.
    spoilt = jax.tree.map(lambda x: jnp.where(case.read(), x, jnp.nan), cache)
    out = _kernel(case, q, spoilt)
    chex.assert_type(out, dtype)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, _reference(case, q, cache), atol=atol)


class LoweringTest(parameterized.TestCase):
  """What a machine without the device can check: that kernels lower."""

  @parameterized.parameters(
    (jnp.bfloat16, jnp.bfloat16, 5120, 128),
    (jnp.float32, jnp.bfloat16, 1100, 80),
  )
  def test_lowers(self, dtype, cache_dtype, slots, dim):
    case = _Case(16, 8, slots, dim, seen=((0, slots),) * 4)
    call = functools.partial(_decode, case, interpret=False)
    shapes = jax.eval_shape(lambda: case.arrays(dtype, cache_dtype))
    self.assertEqual(devices.lowered_kernels("gpu", call, *shapes), 1)
