"""The whole layer of Mixture-of-Head attention; and TransNeXt's two.

Numbers of the latter are held against the public release in tests/parity.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.config.heads import RouterConfig
from moh_jax.layers.moh import MoHAttention, Places
from tests.layers import small

_QUERY_NORM = RouterConfig("query_norm")


class MoHAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, {"x": (6, 8)}, r"x has shape \(6, 8\), must be .B, N, C. .* reshape"),
    ({}, {"x": (4, 2, 6, 8)}, r"x has shape \(4, 2, 6, 8\), .* or jax.vmap"),
    ({}, {"token_mask": (2, 5)}, r"float32\(2, 5\) must be bool\(2, 5\)"),
    ({}, {"context": (2, 5)}, r"context has shape \(2, 5\), .* token_mask="),
    ({"causal": True}, {"context": (2, 7, 8)}, "context causal must be False"),
    ({}, {"context": (2, 7, 8), "places": Places()}, "and places None"),
    ({"qk_norm": True}, {}, "qk_norm=True must be the norm's epsilon"),
    *(
      ({"kernel_init": init}, {}, "must make an initializer from a kernel's in")
      for init in (nn.initializers.xavier_uniform(), nn.initializers.zeros)
    ),
    ({"budget": 8}, {}, "budget=8 must be a HeadBudget"),
    ({"router": "gate"}, {}, "router='gate' must be a RouterConfig"),
    ({}, {"x": [[1.0]]}, r"x has shape \(1, 1\), must be"),
    ({}, {"context_mask": (2, 5)}, r"context_mask needs a context"),
    ({}, {"context": (2, 7, 8), "context_mask": (2, 5)},
     r"context_mask float32\(2, 5\) must be bool\(2, 7\)"),
  )  # fmt: skip
  def test_what_does_not_fit_is_named(self, fields, given, message):
    given = {"x": (2, 5, 8)} | given
    given = {
      name: jnp.ones(value) if isinstance(value, tuple) else value
      for name, value in given.items()
    }
    with self.assertRaisesRegex((TypeError, ValueError), message):
      layer = MoHAttention(**{"budget": small.BUDGET, **fields})
      layer.init(jax.random.key(0), **given)

  def test_masks_of_integers_are_masks(self):
    layer, x = MoHAttention(small.BUDGET), small.tokens()
    mask = jnp.arange(small.N)[None] < jnp.array([[3], [small.N]])
    params, apply = small.params(layer, x), jax.jit(layer.apply)
    expected = apply(params, x, token_mask=mask)
    found = apply(params, x, token_mask=mask.astype(jnp.int32))
    chex.assert_trees_all_equal(found, expected)
    with self.assertRaisesRegex(TypeError, "no mask: padding is token_mask"):
      layer.apply(params, x, mask=mask)

  @parameterized.parameters("dense", "packed", "kernel")
  @pytest.mark.integration
  def test_context_gives_keys_and_values_and_x_chooses(self, implementation):
    layer = MoHAttention(small.BUDGET, implementation=implementation)
    x, keys = small.tokens(), jnp.arange(7)[None].repeat(small.B, 0) < 4
    context = jax.random.normal(jax.random.key(1), (small.B, 7, 11))
    variables, apply = small.params(layer, x, context), jax.jit(layer.apply)
    y, aux = apply(variables, x, context, context_mask=keys)
    short = apply(variables, x, context[:, :4])[0]
    chex.assert_trees_all_close(y, short, atol=2e-6)
    other = apply(variables, x, -context, context_mask=keys)
    chex.assert_trees_all_equal(other[1], aux)
    self.assertGreater(float(jnp.abs(other[0] - y).max()), 1e-2)

  @parameterized.product(kind=("two_stage", "none"), bias=(True, False))
  def test_multiplier_is_that_of_the_output_layer(self, kind, bias):
    plain = MoHAttention(small.BUDGET, RouterConfig(kind), use_bias=bias)
    x = small.tokens()
    variables = small.params(plain, x)
    want, aux = jax.jit(plain.apply)(variables, x)
    y, same = jax.jit(plain.clone(out_multiplier=0.3).apply)(variables, x)
    chex.assert_trees_all_close(y, 0.3 * want, atol=2e-6)
    chex.assert_trees_all_equal(same, aux)

  def test_dropout_needs_an_rng_and_ends_by_deterministic(self):
    layer, x = MoHAttention(small.BUDGET, dropout_rate=0.5), small.tokens()
    variables, rngs = small.params(layer, x), {"dropout": jax.random.key(1)}
    whole = layer.apply(variables, x)[0]
    dropped = layer.apply(variables, x, rngs=rngs)[0]
    share = float((dropped == 0).mean())
    self.assertBetween(share, 0.3, 0.7)
    kept = jnp.where(dropped == 0, 0, 2 * whole)
    chex.assert_trees_all_close(dropped, kept, rtol=1e-6)
    same = layer.apply(variables, x, deterministic=True, rngs=rngs)[0]
    chex.assert_trees_all_equal(same, whole)
    with self.assertRaisesRegex(Exception, 'needs PRNG for "dropout"'):
      layer.apply(variables, x, deterministic=False)

  def test_param_dtype_is_that_of_all_but_the_router(self):
    layer = MoHAttention(
      small.BUDGET, qk_norm=1e-6, param_dtype=jnp.bfloat16, num_kv_heads=2
    )
    boxed = jax.eval_shape(layer.init, jax.random.key(0), small.tokens())
    params = nn.unbox(boxed)["params"]
    chex.assert_type(jax.tree.leaves(params.pop("router")), jnp.float32)
    chex.assert_type(jax.tree.leaves(params), jnp.bfloat16)

  @parameterized.parameters((nn.scan, (), {"length": 3}), (nn.vmap, (3,), {}))
  def test_transformations_need_no_metadata(self, transform, lead, more):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x):
        return MoHAttention(small.BUDGET)(x)

    how = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    module, x = transform(Layer, **how, **more)(), jnp.ones((*lead, 2, 5, 8))
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    out = variables["params"]["MoHAttention_0"]["out"]["kernel"]
    self.assertEqual(out.names, (None, "heads", "head_dim", "embed"))
    self.assertEqual(out.value.shape[0], 3)
    jax.eval_shape(module.apply, variables, x)


class QueryNormAttentionTest(parameterized.TestCase):
  def test_norm_of_queries_and_keys_does_not_change_the_routing(self):
    x = small.tokens()
    plain = MoHAttention(small.BUDGET, _QUERY_NORM)
    normed = MoHAttention(small.BUDGET, _QUERY_NORM, qk_norm=1e-6)
    variables = small.params(normed, x)
    rest = dict(variables["params"])
    self.assertEqual(rest.pop("q_norm")["scale"].shape, (3,))
    self.assertEqual(rest.pop("k_norm")["scale"].shape, (3,))
    ours, theirs = (
      module.apply(given, x, mutable=["intermediates"])
      for module, given in ((normed, variables), (plain, {"params": rest}))
    )
    chex.assert_trees_all_equal(ours[1], theirs[1])
    self.assertGreater(float(jnp.abs(ours[0][0] - theirs[0][0]).max()), 1e-2)
