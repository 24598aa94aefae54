"""The convolutional gated linear unit."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.layers.mlp import ConvGLU, DepthwiseConv

_B, _C, _F, _GRID = 2, 4, 6, (3, 5)
_N = math.prod(_GRID)


def _tokens(dtype=jnp.float32):
  x = np.random.default_rng(0).normal(size=(_B, _N, _C))
  return jnp.asarray(x, dtype)


def _params(module, x):
  shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), x)))
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )


def _reference(params, x):
  """The formula in float64, the convolution as a loop."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)

  def dense(name, x):
    return x @ params[name]["kernel"] + params[name]["bias"]

  x = np.asarray(x, np.float64)
  gate = dense("gate", x).reshape(_B, *_GRID, _F)
  padded = np.pad(gate, [(0, 0), (1, 1), (1, 1), (0, 0)])
  taps, bias = params["dwconv"]["kernel"], params["dwconv"]["bias"]
  conv = sum(
    padded[:, i : i + _GRID[0], j : j + _GRID[1]] * taps[i, j]
    for i, j in np.ndindex(3, 3)
  )
  conv = (conv + bias).reshape(_B, _N, _F)
  cdf = 0.5 * (1 + np.vectorize(math.erf)(conv / math.sqrt(2)))
  return dense("out", conv * cdf * dense("value", x))


class ConvGLUTest(parameterized.TestCase):
  def test_equals_numpy_reference(self):
    module, x = ConvGLU(_F, _GRID), _tokens()
    variables = _params(module, x)
    out = jax.jit(module.apply)(variables, x)
    expected = _reference(variables["params"], x)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-4)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_shapes_and_dtypes(self, dtype):
    module = ConvGLU(_F, _GRID, dtype=dtype)
    out, variables = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x), _tokens(dtype)
    )
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)

  def test_gradients_reach_every_parameter(self):
    module, x = ConvGLU(_F, _GRID), _tokens()

    @jax.jit
    @jax.grad
    def gradient(variables):
      return jnp.sum(module.apply(variables, x) ** 2)

    grads = gradient(_params(module, x))
    chex.assert_tree_all_finite(grads)
    for leaf in jax.tree.leaves(grads):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)


class DepthwiseConvTest(parameterized.TestCase):
  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_shapes_and_dtypes(self, dtype):
    module = DepthwiseConv(dtype=dtype)
    out, variables = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x),
      jnp.ones((_B, *_GRID, _F), jnp.float32),
    )
    chex.assert_shape(out, (_B, *_GRID, _F))
    chex.assert_type(out, dtype)
    chex.assert_shape(nn.unbox(variables)["params"]["kernel"], (3, 3, _F))
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)

  def test_bias_is_added_once_to_every_position(self):
    module, x = DepthwiseConv(), jnp.zeros((1, 3, 3, 2))
    variables = _params(module, x)
    out = module.apply(variables, x)
    expected = np.broadcast_to(variables["params"]["bias"], out.shape)
    np.testing.assert_array_equal(out, expected)


if __name__ == "__main__":
  absltest.main()
