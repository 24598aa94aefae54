"""The language model with a cache of keys and values."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import LLMConfig
from moh_jax.models.llm import LLM, unroll
from moh_jax.ops.cache import Slots
from tests.models import small

_CACHED = {
  "two_stage_grouped": (small.CONFIG, False),
  "query_norm_tied_mha": (small.TIED, True),
  "qk_norm_yarn": (small.NORMED, True),
  "none_unequal": (
    small.changed("none", shared_heads=(4, 3), top_k=(0, 1)),
    True,
  ),
}
_SLOTS, _PROMPT = 12, 4


@functools.cache
def _extend(config: LLMConfig, unrolled: bool):
  model = LLM(config, unrolled=unrolled)
  return jax.jit(functools.partial(model.apply, method="extend"))


def _decode(config: LLMConfig, unrolled: bool, dtype: str = "float32"):
  """Logits of every place, [B, N, V], by a cache: a prompt, then one by one."""
  params = small.random_variables(config)["params"]
  if unrolled:
    params = unroll(params, config)
  cache = LLM(config, unrolled=unrolled).new_cache(small.B, _SLOTS, dtype)
  pad = jnp.array([0, 2])[:, None]
  place = jnp.arange(small.N)[None] - pad
  logits = []
  for start in (0, *range(_PROMPT, small.N)):
    stop, token_mask, first = start + 1, None, pad[:, 0]
    if start == 0:
      stop, first = _PROMPT, None
      token_mask = place[:, :stop] >= 0
    out, _, cache = _extend(config, unrolled)(
      {"params": params},
      small.random_tokens()[:, start:stop],
      cache,
      Slots(jnp.int32(start), first),
      positions=jnp.maximum(place[:, start:stop], 0),
      token_mask=token_mask,
    )
    logits.append(out)
  return jnp.concatenate(logits, axis=1), cache


class CacheTest(parameterized.TestCase):
  def _whole(self, config):
    place = jnp.arange(small.N)[None] - jnp.array([0, 2])[:, None]
    logits, _ = small.forward(
      config, positions=jnp.maximum(place, 0), token_mask=place >= 0
    )
    return logits

  @parameterized.parameters(*_CACHED)
  def test_logits_of_every_place_are_those_of_the_whole(self, name):
    config, unrolled = _CACHED[name]
    logits, _ = _decode(config, unrolled)
    expected = self._whole(config)
    np.testing.assert_allclose(logits[0], expected[0], atol=2e-5)
    np.testing.assert_allclose(logits[1, 2:], expected[1, 2:], atol=2e-5)

  def test_int8_cache_is_close(self):
    config, unrolled = _CACHED["none_unequal"]
    logits, cache = _decode(config, unrolled, "int8")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(cache)}
    self.assertEqual(kinds, {"int8", "float32"})
    expected = self._whole(config)
    gap = float(jnp.abs(logits - expected)[0].max())
    self.assertBetween(gap, 1e-5, 0.05 * float(jnp.abs(expected).max()))

  @parameterized.parameters(False, True)
  def test_calls_with_one_cache_do_not_influence_each_other(self, unrolled):
    params = small.random_variables(small.CONFIG)["params"]
    if unrolled:
      params = unroll(params, small.CONFIG)
    prompt, others = small.random_tokens()[:, :4], small.random_tokens()[:, 4:]
    model = LLM(small.CONFIG, unrolled=unrolled)
    extend = functools.partial(
      _extend(small.CONFIG, unrolled), {"params": params}
    )
    empty = model.new_cache(small.B, _SLOTS)
    _, _, cache = extend(prompt, empty, Slots(jnp.int32(0)))

    def write(token):
      slots = Slots(jnp.int32(4), jnp.zeros(small.B, jnp.int32))
      logits, _, new = extend(token, cache, slots)
      return logits, new

    before = jax.tree.map(np.array, cache)
    logits, new = write(others[:, :1])
    expected, _ = small.forward()  # positions follow the slots
    np.testing.assert_allclose(logits[:, 0], expected[:, 4], atol=2e-5)
    write(others[:, 1:2])
    chex.assert_trees_all_equal(cache, before)
    again, same = write(others[:, :1])
    chex.assert_trees_all_equal((again, same), (logits, new))
    for old, leaf in zip(jax.tree.leaves(cache), jax.tree.leaves(new)):
      self.assertGreater(float(jnp.abs(leaf - old).max()), 0.0)

  def test_new_cache_has_a_layer_axis_unless_unrolled(self):
    (stacked,) = LLM(small.CONFIG).new_cache(3, 5, "int8")
    chex.assert_shape(stacked.k, (2, 3, 2, 5, 8))
    chex.assert_shape(stacked.k_scale, (2, 3, 2, 1, 5))
    ((first, _),) = LLM(small.CONFIG, unrolled=True).new_cache(3, 5, "int8")
    chex.assert_shape(first.k, (3, 2, 5, 8))
