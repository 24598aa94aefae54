"""Feed-forward layers: plain, gated, and gated by a convolution."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.layers.mlp import MLP, ConvGLU, DepthwiseConv, SwiGLU

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


class MLPTest(parameterized.TestCase):
  def test_equals_numpy_reference(self):
    module, x = MLP(_F), _tokens()
    variables = _params(module, x)
    params = jax.tree.map(np.float64, variables["params"])
    hidden = np.float64(x) @ params["up"]["kernel"] + params["up"]["bias"]
    inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    hidden = 0.5 * hidden * (1 + np.tanh(inner))
    expected = hidden @ params["down"]["kernel"] + params["down"]["bias"]
    out = jax.jit(module.apply)(variables, x)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_shapes_and_dtypes(self, dtype):
    module = MLP(_F, dtype=dtype)
    out, variables = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x), _tokens(dtype)
    )
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    params = nn.unbox(variables)["params"]
    chex.assert_shape(params["up"]["kernel"], (_C, _F))
    chex.assert_shape(params["down"]["kernel"], (_F, _C))

  def test_kernels_start_uniform_by_fan_in_and_fan_out(self):
    x = jnp.zeros((1, 1, 40))
    params = nn.unbox(jax.jit(MLP(200).init)(jax.random.key(0), x))["params"]
    bound = math.sqrt(6 / 240)
    for layer in params.values():
      np.testing.assert_array_equal(layer["bias"], 0.0)
      largest = float(jnp.abs(layer["kernel"]).max())
      self.assertBetween(largest, 0.98 * bound, bound)
      np.testing.assert_allclose(
        layer["kernel"].std(), bound / math.sqrt(3), rtol=0.03
      )

  def test_gradients_transpose_no_activations(self):
    """On a CPU such a copy takes a large part of the product's time."""
    module, x = MLP(56), jnp.ones((2, 24, 40))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))

    def loss(params):
      return jnp.sum(jax.nn.silu(module.apply(params, jnp.sin(x))) ** 2)

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    self.assertTrue("f32[48,56]" in text)  # the text is too long for a message
    self.assertFalse("f32[56,48]" in text or "f32[40,48]" in text)

  def test_gradients_reach_every_parameter(self):
    module, x = MLP(_F), _tokens()

    @jax.jit
    @jax.grad
    def gradient(variables):
      return jnp.sum(module.apply(variables, x) ** 2)

    grads = gradient(_params(module, x))
    chex.assert_tree_all_finite(grads)
    for leaf in jax.tree.leaves(grads):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)


class SwiGLUTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_equals_numpy_reference(self, use_bias):
    module, x = SwiGLU(_F, use_bias), _tokens()
    variables = _params(module, x)
    params = jax.tree.map(np.float64, variables["params"])

    def dense(name, x):
      return x @ params[name]["kernel"] + params[name].get("bias", 0)

    gate = dense("gate", np.float64(x))
    hidden = gate / (1 + np.exp(-gate)) * dense("up", np.float64(x))
    out = jax.jit(module.apply)(variables, x)
    np.testing.assert_allclose(out, dense("down", hidden), rtol=2e-5, atol=2e-5)

  @parameterized.product(dtype=(jnp.float32, jnp.bfloat16), use_bias=(0, 1))
  def test_shapes_and_dtypes(self, dtype, use_bias):
    module = SwiGLU(_F, bool(use_bias), dtype=dtype)
    out, variables = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x), _tokens(dtype)
    )
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    leaves = ["kernel", "bias"] if use_bias else ["kernel"]
    shapes = {"gate": (_C, _F), "up": (_C, _F), "down": (_F, _C)}
    params = nn.unbox(variables)["params"]
    self.assertCountEqual(params, shapes)
    for name, shape in shapes.items():
      self.assertCountEqual(params[name], leaves)
      chex.assert_shape(params[name]["kernel"], shape)

  def test_kernels_start_with_the_deviation_of_linear_layers(self):
    x = jnp.zeros((1, 1, 40))
    init = jax.jit(SwiGLU(200, use_bias=True).init)
    params = nn.unbox(init(jax.random.key(0), x))["params"]
    for layer in params.values():
      np.testing.assert_array_equal(layer["bias"], 0.0)
      np.testing.assert_allclose(layer["kernel"].std(), 0.02, rtol=0.05)


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
