"""The layer by itself in plain Linen, and in NNX."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from absl.testing import absltest
from flax import nnx

from moh_jax.layers.moh import MoHAttention
from tests.layers import small


class FlaxTest(absltest.TestCase):
  """The layer in plain Linen and in NNX."""

  def setUp(self):
    super().setUp()
    self.module = MoHAttention(small.BUDGET, num_kv_heads=3)
    self.boxed = self.module.init(jax.random.key(0), small.tokens())

  def _gradient(self, variables):
    def loss(variables):
      out, aux = self.module.apply(variables, small.tokens())
      return jnp.sum(out**2) + aux.balance_loss

    return jax.jit(jax.grad(loss))(variables)

  def test_boxed_and_plain_parameters_give_the_same(self):
    plain = {"params": nn.unbox(self.boxed)["params"]}
    for leaf in jax.tree.leaves(
      plain, is_leaf=lambda x: not isinstance(x, dict)
    ):
      self.assertIsInstance(leaf, jax.Array)
    chex.assert_trees_all_equal(
      self.module.apply(plain, small.tokens()),
      self.module.apply(self.boxed, small.tokens()),
    )
    chex.assert_trees_all_equal(
      self._gradient(plain), nn.unbox(self._gradient(self.boxed))
    )

  def test_nnx_gives_what_linen_gives(self):
    layer = nnx.bridge.ToNNX(self.module, rngs=nnx.Rngs(0))
    layer.lazy_init(small.tokens())
    state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables = {"params": state}
    chex.assert_trees_all_equal_shapes(
      variables, {"params": nn.unbox(self.boxed)["params"]}
    )
    chex.assert_trees_all_close(
      layer(small.tokens()),
      self.module.apply(variables, small.tokens()),
      rtol=1e-6,
    )

    @nnx.jit
    @nnx.grad
    def gradient(layer):
      out, aux = layer(small.tokens())
      return jnp.sum(out**2) + aux.balance_loss

    chex.assert_trees_all_close(
      nnx.to_pure_dict(gradient(layer)),
      self._gradient(variables)["params"],
      rtol=1e-5,
      atol=1e-6,
    )

  def test_nnx_keeps_the_logical_axes(self):
    layer = nnx.bridge.ToNNX(self.module, rngs=nnx.Rngs(0))
    layer.lazy_init(small.tokens())
    self.assertEqual(
      layer.out["kernel"].out_sharding, ("heads", "head_dim", "embed")
    )


if __name__ == "__main__":
  absltest.main()
