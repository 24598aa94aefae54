"""Kernels the other way round, and products that copy nothing."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from absl.testing import parameterized

from moh_jax.layers.heads import HeadMix, HeadProjection
from moh_jax.layers.linear import Linear
from moh_jax.layers.mlp import MLP, ConvGLU
from tests.layers import small

_X = jax.random.normal(jax.random.key(0), (2, 3, 8))


class OutputMajorTest(parameterized.TestCase):
  """The same weights the other way round give the same result."""

  @parameterized.product(
    case=(
      (Linear, {"features": 5, "axes": ("embed", "mlp")}, 0, -1),
      (HeadProjection, {"parts": 2, "num_heads": 3, "head_dim": 4}, 0, -1),
      (HeadMix, {"features": 5}, -1, 0),
    ),
    dtype=(jnp.float32, jnp.bfloat16),
  )
  def test_gives_the_same(self, case, dtype):
    module, sizes, source, target = case
    x = _X.reshape(2, 3, 2, 4) if module is HeadMix else _X
    plain = module(**sizes, dtype=dtype)
    turned = module(**sizes, dtype=dtype, output_major=True)
    params = small.params(plain, x)["params"]
    out = plain.apply({"params": params}, x)
    kernel = jnp.moveaxis(params["kernel"], source, target)
    again = turned.apply({"params": {**params, "kernel": kernel}}, x)
    chex.assert_type(again, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 5e-2
    chex.assert_trees_all_close(out, again, atol=tolerance)


class GradientsTest(parameterized.TestCase):
  @parameterized.parameters(
    (MLP(56), 2), (MLP(56, True), 3), (MLP(56, True, output_major=True), 3),
    (ConvGLU(56, (4, 6)), 4), (MLP(56, True, dtype=jnp.bfloat16), 3),
  )  # fmt: skip
  def test_few_arrays_of_hidden_width_are_kept(self, module, most):
    """The inputs of the activation and of the products (and a convolution)."""
    x = jnp.ones((2, 24, 40))
    params = jax.eval_shape(module.init, jax.random.key(0), x)

    def backward(params):
      return jax.vjp(module.apply, nn.unbox(params), x)[1]

    leaves = jax.tree.leaves(jax.eval_shape(backward, params))
    self.assertLen([1 for kept in leaves if kept.size == 48 * 56], most)

  def test_no_activations_are_transposed(self):
    """On a CPU such a copy takes a large part of the product's time."""
    module, x = MLP(56), jnp.ones((2, 24, 40))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))

    def loss(params):
      return jnp.sum(jax.nn.silu(module.apply(params, jnp.sin(x))) ** 2)

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    self.assertTrue("f32[48,56]" in text)  # the text is too long for a message
    self.assertFalse("f32[56,48]" in text or "f32[40,48]" in text)
