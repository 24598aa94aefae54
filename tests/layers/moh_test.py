"""The whole layer of Mixture-of-Head attention; and TransNeXt's two.

Numbers of the latter are held against the public release in tests/parity.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import nnx

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.aggregated import AggregatedAttention
from moh_jax.layers.moh import MoHAttention
from moh_jax.ops.position import relative_coordinates
from tests.layers import small

_QUERY_NORM = RouterConfig("query_norm")


class MoHAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, (6, 16), None, r"x has shape \(6, 16\), must be \[B, N, C\]"),
    ({}, (2, 6, 8), jnp.ones((2, 6)), r"float32\(2, 6\) must be bool\(2, 6\)"),
    ({"budget": 8}, (2, 6, 8), None, "budget=8 must be a HeadBudget"),
    ({"num_kv_heads": 0}, (2, 6, 8), None, "num_kv_heads=0 must"),
    ({"num_kv_heads": 4}, (2, 6, 8), None, "num_kv_heads=4 must"),
    ({"implementation": "flush"}, (2, 6, 8), None, "implementation='flush'"),
  )
  def test_what_does_not_fit_is_named(self, fields, shape, mask, message):
    layer = MoHAttention(**{"budget": small.BUDGET} | fields)
    with self.assertRaisesRegex(ValueError, message):
      layer.init(jax.random.key(0), jnp.ones(shape), token_mask=mask)

  @parameterized.parameters(
    ({"window": 2}, "window=2 must be odd"),
    *(({"pool_grid": grid}, rf"pool_grid=\({grid[0]}, 2\) must be in")
      for grid in ((0, 2), (64, 2))),
  )  # fmt: skip
  def test_other_windows_and_pools_are_named(self, fields, message):
    grids = {"grid": (4, 6), "pool_grid": (2, 3)}
    module = AggregatedAttention(HeadBudget(4, 1, 2, 3), **grids | fields)
    coordinates = relative_coordinates(*grids.values())
    with self.assertRaisesRegex(ValueError, message):
      module.init(jax.random.key(0), jnp.ones((2, 24, 12)), coordinates)


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


class FlaxTest(absltest.TestCase):
  def test_boxed_and_plain_parameters_and_nnx_give_the_same(self):
    module, x = MoHAttention(small.BUDGET, num_kv_heads=3), small.tokens()
    layer = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    variables = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    boxed = module.init(jax.random.key(0), x)
    plain = nn.unbox(boxed)
    chex.assert_trees_all_equal_shapes(variables, plain)
    chex.assert_trees_all_equal(module.apply(plain, x), module.apply(boxed, x))
    want = module.apply(variables, x)
    chex.assert_trees_all_close(layer(x), want, rtol=1e-6)
    axes = layer.out["kernel"].out_sharding
    self.assertEqual(axes, ("heads", "head_dim", "embed"))

    def loss(result):
      return jnp.sum(result[0] ** 2) + result[1].balance_loss

    ours = nnx.jit(nnx.grad(lambda layer: loss(layer(x))))(layer)
    want = jax.jit(jax.grad(lambda v: loss(module.apply(v, x))))(variables)
    chex.assert_trees_all_close(
      {"params": nnx.to_pure_dict(ours)}, want, rtol=1e-5, atol=1e-6
    )
