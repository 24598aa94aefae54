"""The NNX layer: the parameters and numbers of the Linen one, and training."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import absltest
from flax import nnx

import moh_jax
from moh_jax.nnx import MoHAttention
from moh_jax.ops.cache import Slots, make_cache
from tests.layers import small


class MoHAttentionTest(absltest.TestCase):
  @pytest.mark.integration
  def test_has_the_parameters_and_numbers_of_linen(self):
    linen, x = (
      moh_jax.MoHAttention(small.BUDGET, num_kv_heads=3),
      small.tokens(),
    )
    layer = MoHAttention(8, small.BUDGET, num_kv_heads=3, rngs=nnx.Rngs(0))
    boxed = linen.init(jax.random.key(0), x)
    plain = nn.unbox(boxed)
    chex.assert_trees_all_equal(linen.apply(plain, x), linen.apply(boxed, x))
    params = nnx.to_pure_dict(nnx.state(layer))
    chex.assert_trees_all_equal_shapes(params, plain["params"])
    nnx.update(layer, plain["params"])
    chex.assert_trees_all_equal(layer(x), linen.apply(plain, x))
    axes = layer.out["kernel"].out_sharding
    self.assertEqual(axes, ("heads", "head_dim", "embed"))

    def loss(result):
      return jnp.sum(result[0] ** 2) + result[1].balance_loss

    ours = nnx.jit(nnx.grad(lambda layer: loss(layer(x))))(layer)
    want = jax.jit(jax.grad(lambda v: loss(linen.apply(v, x))))(plain)
    chex.assert_trees_all_close(
      nnx.to_pure_dict(ours), want["params"], rtol=1e-5, atol=1e-6
    )

  @pytest.mark.integration
  def test_is_trained_with_dropout_which_eval_ends(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.attention = MoHAttention(
          8, small.BUDGET, context_features=3, dropout_rate=0.5, rngs=rngs
        )

      def __call__(self, x, context):
        return self.attention(x, context)

    model, x = Model(nnx.Rngs(0)), small.tokens()
    context = jax.random.normal(jax.random.key(1), (small.B, 7, 3))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
      grads = nnx.grad(lambda m: jnp.sum((m(x, context)[0] - 1) ** 2))(model)
      optimizer.update(model, grads)

    first, second = (model(x, context)[0] for _ in range(2))
    self.assertBetween(float((first == 0).mean()), 0.3, 0.7)
    self.assertTrue(bool((first != second).any()))  # another mask each time
    views = (nnx.view(model, deterministic=True) for _ in range(2))
    chex.assert_trees_all_equal(*(view(x, context)[0] for view in views))
    model.eval()
    before = float(jnp.sum((model(x, context)[0] - 1) ** 2))
    model.train()
    for _ in range(20):
      step(model, optimizer)
    model.eval()
    after = model(x, context)[0]
    chex.assert_trees_all_equal(after, model(x, context)[0])
    self.assertLess(float(jnp.sum((after - 1) ** 2)), before)

  def test_what_it_reads_beside_tokens_is_known_from_the_start(self):
    router = moh_jax.RouterConfig("timestep")
    layer = MoHAttention(
      8, small.BUDGET, time_features=7, router=router, rngs=nnx.Rngs(0)
    )
    x, time = small.tokens(), jnp.ones((small.B, 7))
    self.assertEqual(layer(x, time=time)[0].shape, x.shape)
    with self.assertRaisesRegex(ValueError, "made with context_features"):
      layer(x, x, time=time)

  def test_decodes_and_draws_nothing_in_eval(self):
    options = {"causal": True, "dropout_rate": 0.5, "rngs": nnx.Rngs(0)}
    layer, x = MoHAttention(8, small.BUDGET, **options), small.tokens()
    layer.eval()
    heads = small.BUDGET.num_heads
    cache = make_cache(
      small.B, heads, small.N, small.BUDGET.head_dim, "float32"
    )
    slots = Slots(jnp.int32(0))
    decode = nnx.jit(lambda *args: layer.decode(*args), donate_argnums=1)
    out, *_ = decode(x, cache, slots)
    chex.assert_trees_all_close(out, layer(x)[0], atol=1e-6)
