"""The language model: packed texts, caches, routers, layouts of parameters.

Its numbers, causal and padded, are held against the releases in tests/parity.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config import RotaryConfig
from moh_jax.models.llm import LLM, apply_packed, unroll
from moh_jax.models.registry import fit_params, restack
from moh_jax.ops.cache import Slots
from moh_jax.runtime.parameters import init_params, unbox
from tests.models import small


class LLMTest(parameterized.TestCase):
  @parameterized.parameters(
    *({"router": router} for router in small.ROUTERS),
    # Documents keep a dynamic base of their own.
    {"rope": RotaryConfig(scaling="dynamic", factor=4.0, original_length=2)},
  )
  @pytest.mark.integration
  def test_packed_documents_are_as_those_alone(self, **changes):
    config, tokens = small.changed(**changes), small.random_tokens()
    packed, _ = small.forward(
      config,
      tokens,
      segments=jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]] * 2),
      positions=jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]] * 2),
    )
    for part in (slice(0, 3), slice(3, 8)):
      alone, _ = small.forward(config, tokens[:, part])
      np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)

  @parameterized.parameters("token_mask", "counted", "segments")
  def test_padding_does_not_count_in_the_side_values(self, name):
    tokens = small.random_tokens()
    mask = jnp.array([[True] * small.N, [True, True] + [False] * (small.N - 2)])
    other = jnp.where(mask, tokens, 7)
    params = small.random_variables(small.LLM)["params"]

    @jax.jit
    def side(tokens):
      if name == "segments":  # of packed sequences
        places = jnp.broadcast_to(jnp.arange(small.N), tokens.shape)
        batch = {"inputs": tokens, "positions": places, "segments": mask * 1}
        return apply_packed(LLM(small.LLM), params, batch)[1]
      return LLM(small.LLM).apply({"params": params}, tokens, **{name: mask})[1]

    chex.assert_trees_all_close(side(tokens), side(other), rtol=1e-6)
    _, whole = small.forward()
    gap = float(abs(side(tokens).balance_loss - whole.balance_loss))
    self.assertGreater(gap, 1e-4)

  @pytest.mark.integration
  def test_matrices_start_as_megatrons(self):
    config = dataclasses.replace(small.BIASED, width=64, vocab_size=200)
    init = functools.partial(init_params, LLM(config))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = unbox(jax.jit(init)(jax.random.key(0), [tokens]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
      name = jax.tree_util.keystr(path)
      if "scale" in name:
        np.testing.assert_array_equal(leaf, 1.0)
      elif "bias" in name:
        np.testing.assert_array_equal(leaf, 0.0)
      else:
        # What ends a branch, by the number of branches.
        ends = "'out'" in name or "'down'" in name
        want = 0.02 / np.sqrt(2 * config.depth) if ends else 0.02
        spread = 4 / np.sqrt(leaf.size)
        np.testing.assert_allclose(leaf.std(), want, rtol=spread, err_msg=name)

  @pytest.mark.integration
  def test_order_of_heads_is_as_if_the_weights_of_each_layer_were_moved(self):
    order = ((3, 0, 1, 2), (1, 2, 3, 0), (2, 3, 0, 1))
    layers = {"num_heads": (4,) * 3, "shared_heads": (1,) * 3}
    plain = small.changed(
      "query_norm", num_kv_heads=4, top_k=(1, 1, 2), **layers
    )
    variables = small.random_variables(plain)
    ordered, _ = small.forward(
      dataclasses.replace(plain, head_order=order), variables=variables
    )
    moved = jax.tree.map(jnp.copy, variables)
    places = (("blocks0", 0), ("blocks0", 1), ("blocks1", 0))
    for (stack, layer), heads in zip(places, np.array(order)):
      attn = moved["params"][stack]["attn"]
      qkv, out = attn["qkv"]["kernel"], attn["out"]["kernel"]
      attn["qkv"]["kernel"] = qkv.at[layer].set(qkv[layer][:, :, heads])
      attn["out"]["kernel"] = out.at[layer].set(out[layer][heads])
    expected, _ = small.forward(plain, variables=moved)
    np.testing.assert_allclose(ordered, expected, atol=2e-5)
    unmoved, _ = small.forward(plain, variables=variables)
    self.assertGreater(float(jnp.abs(ordered - unmoved).max()), 1e-2)

  @parameterized.parameters("two_stage", "query_norm")
  def test_top_k_as_an_input_is_that_of_the_config(self, router):
    plain, wanted = small.changed(router), small.changed(router, top_k=(1, 3))
    logits, aux = small.forward(plain, top_k=jnp.array(wanted.top_k, jnp.int32))
    params = small.random_variables(plain)["params"]
    variables = {"params": restack(params, plain, wanted)}
    expected, expected_aux = small.forward(wanted, variables=variables)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    for name in ("activated_share", "balance_loss"):
      np.testing.assert_allclose(
        getattr(aux, name), getattr(expected_aux, name), rtol=1e-5
      )


_PLAIN = small.changed("none", shared_heads=(4, 3), top_k=(0, 1))
_RUNS = small.changed(
  num_heads=(4,) * 3, shared_heads=(1, 1, 2), top_k=(2, 2, 1)
)


class ParametersTest(parameterized.TestCase):
  """Layers with parameters of their own, caches, and new tokens."""

  @parameterized.parameters(
    (small.CONFIG, False),
    *((config, True) for config in (small.TIED, small.NORMED, small.BIASED)),
    (_RUNS, True),
  )
  @pytest.mark.integration
  def test_logits_by_a_cache_are_those_of_the_whole(self, config, unrolled):
    params = small.random_variables(config)["params"]
    if unrolled:
      params = unroll(params, config)
    model = LLM(config, unrolled=unrolled)
    extend = jax.jit(functools.partial(model.apply, method="extend"))
    cache = model.new_cache(small.B, 12)
    pad = jnp.array([0, 2])[:, None]
    place = jnp.arange(small.N)[None] - pad
    logits = []
    for start in (0, *range(4, small.N)):  # a prompt, then one by one
      stop, token_mask, first = start + 1, None, pad[:, 0]
      if start == 0:
        stop, first = 4, None
        token_mask = place[:, :stop] >= 0
      out, _, cache = extend(
        {"params": params},
        small.random_tokens()[:, start:stop],
        cache,
        Slots(jnp.int32(start), first),
        positions=jnp.maximum(place[:, start:stop], 0),
        token_mask=token_mask,
      )
      logits.append(out)
    expected, _ = small.forward(
      config, positions=jnp.maximum(place, 0), token_mask=place >= 0
    )
    gaps = np.abs(np.concatenate(logits, axis=1) - expected)
    gap = max(gaps[0].max(), gaps[1, 2:].max())
    largest = float(jnp.abs(expected).max())
    # One token's logits differ from those in float64 by 2e-5 (of 7) with one
    # row a product, by 5e-6 with all: rounding that depends on the processor.
    self.assertLess(gap, 1e-5 * largest)

  @parameterized.parameters(small.CONFIG, small.TIED)
  def test_new_tokens_are_the_mean_of_the_old(self, config):
    params = small.random_variables(config)["params"]
    # Their runs of equal layers differ too, see inference/restore_test.
    wanted = dataclasses.replace(config, vocab_size=70, top_k=(1, 3))
    grown = fit_params(params, config, wanted)
    chex.assert_trees_all_equal_shapes(
      grown, small.random_variables(wanted)["params"]
    )
    for module, leaf, axis in (
      ("embed", "embedding", 0),
      *([] if config.tie_embeddings else [("head", "kernel", 1)]),
    ):
      new, old = (np.float64(p[module][leaf]) for p in (grown, params))
      new, old = np.moveaxis(new, axis, 0), np.moveaxis(old, axis, 0)
      np.testing.assert_array_equal(new[:60], old)
      np.testing.assert_allclose(new[60:], [old.mean(0)] * 10, atol=1e-6)
    self.assertIs(fit_params(params, config, config), params)
