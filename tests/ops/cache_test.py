"""Key/value caches: what is stored, and attention to it in both forms."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.ops.attention import attention, cached_attention
from moh_jax.ops.cache import LayerCache, Slots, make_cache, write_cache
from moh_jax.ops.head_blocks import ActiveHeads

B, K, M, D = 2, 2, 8, 6
DTYPES = ("float32", "bfloat16", "int8")
write = jax.jit(write_cache)


def vectors(
  tokens: int, heads: int = K, seed: int = 0, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
  """Random [B, tokens, heads, D]."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(B, tokens, heads, D)), dtype)


def filled(
  dtype: str = "float32", tokens: int = M, slot: int = 0
) -> tuple[LayerCache, jax.Array, jax.Array]:
  """A cache with random keys and values in it, and these."""
  k, v = vectors(tokens, seed=1), vectors(tokens, seed=2)
  return write(make_cache(B, K, M, D, dtype), k, v, jnp.int32(slot)), k, v


def stored(cache: LayerCache, name: str) -> np.ndarray:
  """Keys or values as floats, [B, M, K, D]."""
  x = np.asarray(getattr(cache, name), np.float32)
  scale = getattr(cache, f"{name}_scale")
  if scale is not None:
    x = x * np.asarray(scale.mT)
  return x.swapaxes(1, 2)


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
    before, *_ = filled(dtype)
    tokens = 2
    k, v = vectors(tokens, seed=3), vectors(tokens, seed=4)
    after = write(before, k, v, jnp.int32(slot))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    inside = slice(slot, slot + tokens)
    atol = {"float32": 0, "bfloat16": 0.02, "int8": 0.02}[dtype]
    for name, new in (("k", k), ("v", v)):
      np.testing.assert_allclose(stored(after, name)[:, inside], new, atol=atol)
      kept = np.delete(stored(after, name), inside, axis=1)
      expected = np.delete(stored(before, name), inside, axis=1)
      np.testing.assert_array_equal(kept, expected)

    # Texts may have slots of their own.
    apart = write(before, k, v, jnp.asarray([slot, 3]))
    other = write(before, k, v, jnp.int32(3))
    for text, alone in enumerate((after, other)):
      for ours, theirs in zip(*map(jax.tree.leaves, (apart, alone))):
        np.testing.assert_array_equal(ours[text], theirs[text])

  def test_int8_is_off_by_half_a_step_of_its_vector_at_most(self):
    k = vectors(M, seed=5) * jnp.array([1e-3, 50.0])[:, None, None, None]
    cache = make_cache(B, K, M, D, "int8")
    cache = write(cache, k, k, jnp.int32(0))
    largest = np.abs(np.asarray(k)).max(-1, keepdims=True)
    gap = np.abs(stored(cache, "k") - np.asarray(k))
    bound = largest / 127 / 2
    self.assertTrue(np.all(gap <= bound * 1.0001))
    self.assertGreater((gap / bound).max(), 0.5)  # and the bound is tight
    self.assertEqual(int(jnp.abs(cache.k).max()), 127)


_attend = jax.jit(cached_attention, static_argnames="implementation")
_dense = jax.jit(attention, static_argnames="causal")


def _slots(new, seen, first=(0, 0)):
  """The last of `new` tokens sees the slots up to `seen`, the others fewer."""
  return Slots(jnp.asarray(seen) - new, jnp.asarray(first, jnp.int32))


class CachedAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    *((case, "float32", jnp.float32)
      for case in ((2, 1, 8), (6, 3, 3), (6, 1, 3))),
    *itertools.product(
      ((4, 2, M),), ("bfloat16", "int8"), (jnp.float32, jnp.bfloat16)
    ),
  )  # fmt: skip
  def test_equals_dense_attention_to_what_is_stored(self, case, dtype, q_dtype):
    (heads, new, seen), (cache, *_) = case, filled(dtype)
    q = vectors(new, heads, dtype=q_dtype)
    k, v = (jnp.asarray(stored(cache, name)[:, :seen]) for name in "kv")
    out = _attend(q, cache, _slots(new, seen))
    chex.assert_shape(out, q.shape)
    chex.assert_type(out, q_dtype)
    expected = _dense(q.astype(jnp.float32), k, v, causal=True)
    atol = 2e-6 if dtype == "float32" else 3e-6
    atol = atol if q_dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=atol)

  @parameterized.parameters(*DTYPES)
  def test_invisible_slots_do_not_matter(self, dtype):
    cache, *_ = filled(dtype)
    other = write(
      cache, 1e4 * vectors(3, seed=8), 1e4 * vectors(3, seed=9), jnp.int32(5)
    )
    q, slots = vectors(2, 4), _slots(2, 5)
    chex.assert_trees_all_equal(
      _attend(q, cache, slots), _attend(q, other, slots)
    )


class KernelTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product((2, 6), DTYPES, (5,), ((0, 0),)),
    (4, "int8", (3, 7), (1, 0)),  # texts have lengths of their own
  )
  def test_equals_the_dense_form_for_active_heads(
    self, heads, dtype, seen, first
  ):
    cache, *_ = filled(dtype)
    q, slots = vectors(1, heads), _slots(1, seen, first)
    mask = np.arange(heads) % 2 == np.arange(B)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), heads // 2)
    out = _attend(q, cache, slots, active=active, implementation="kernel")
    expected = _attend(q, cache, slots, active=active)
    expected = jnp.where(mask[..., None], expected, 0)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  def test_more_heads_than_the_bound_give_nan_in_their_text(self):
    cache, *_ = filled()
    q, slots = vectors(1, 4), _slots(1, 5)
    mask = np.arange(4) <= 3 * (np.arange(B) == 0)[:, None, None]
    active = ActiveHeads(jnp.asarray(mask), 1)
    out = _attend(q, cache, slots, active=active, implementation="kernel")
    self.assertTrue(np.isnan(out[0]).any())
    expected = jnp.where(mask[..., None], _attend(q, cache, slots), 0)
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)
