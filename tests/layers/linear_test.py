"""Linear and feed-forward layers, projections, and the gated sum of heads."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers.heads import HeadMix, HeadProjection
from moh_jax.layers.linear import Linear, xavier_init
from moh_jax.layers.mlp import MLP, SwiGLU
from moh_jax.layers.moh import MoHAttention
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


_BUDGET = HeadBudget(num_heads=6, shared=3, top_k=1, head_dim=8)
_ROUTER = {"routed": (32, 3), "shared": (32, 3), "group": (32, 2)}


class InitTest(parameterized.TestCase):
  """Kernels by the fans of the whole matrix, or with one deviation."""

  @parameterized.parameters(
    (MoHAttention(_BUDGET, kernel_init=xavier_init),
     _ROUTER | {"qkv": (32, 144), "out": (48, 32)}),
    (MoHAttention(_BUDGET, num_kv_heads=2, kernel_init=xavier_init),
     _ROUTER | {"q": (32, 48), "kv": (32, 32), "out": (48, 32)}),
    (MoHAttention(_BUDGET), dict.fromkeys(("qkv", "out", *_ROUTER))),
    (MLP(200), {"up": (32, 200), "down": (200, 32)}),
    (SwiGLU(200, use_bias=True), dict.fromkeys(("gate", "up", "down"))),
  )  # fmt: skip
  def test_kernels_have_their_deviation_and_biases_are_zero(self, module, fans):
    x = jnp.zeros((1, 1, 32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    kernels = dict(params.pop("router", {}))
    for name, layer in params.items():
      kernels[name] = layer["kernel"]
      np.testing.assert_array_equal(layer["bias"], 0.0)
    self.assertCountEqual(kernels, fans)
    for name, kernel in kernels.items():
      deviation = 0.02
      if fans[name]:
        bound = np.sqrt(6 / sum(fans[name]))
        largest = float(jnp.abs(kernel).max())
        self.assertBetween(largest, 0.95 * bound, bound, name)
        deviation = bound / 3**0.5
      spread = 2 / np.sqrt(kernel.size)
      np.testing.assert_allclose(kernel.std(), deviation, rtol=spread)


class HeadsTest(parameterized.TestCase):
  """Projections to heads and the gated sum of heads, head by head."""

  @parameterized.product(
    parts=(1, 3), dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_projects_each_part_and_head(self, parts, dtype, use_bias):
    module = HeadProjection(parts, 2, 4, use_bias=use_bias, dtype=dtype)
    x = small.tokens()
    variables = small.params(module, x)
    stored = jax.tree.map(np.asarray, variables["params"])
    kernel, bias = stored["kernel"], stored.get("bias", 0.0)
    expected = np.einsum("bnc,cphd->pbnhd", x, kernel)
    expected += np.reshape(bias, (-1, 1, 1, *np.shape(bias)[1:]))
    self._check(module.apply(variables, x), expected, variables, dtype)

  @parameterized.product(
    dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_mixes_gated_heads(self, dtype, use_bias):
    rng = np.random.default_rng(2)
    heads = jnp.asarray(rng.normal(size=(small.B, small.N, 6, 3)), jnp.float32)
    gates = jnp.asarray(rng.uniform(size=heads.shape[:3]), jnp.float32)
    module = HeadMix(small.C, use_bias=use_bias, dtype=dtype)
    variables = small.params(module, heads, gates)
    stored = jax.tree.map(np.asarray, variables["params"])
    for weights in (gates, None):
      one = np.ones(gates.shape) if weights is None else gates
      expected = np.einsum("bnhd,bnh,hdc->bnc", heads, one, stored["kernel"])
      expected += stored.get("bias", 0.0)
      out = module.apply(variables, heads, weights)
      self._check([out], expected[None], variables, dtype)

  def _check(self, got, expected, variables, dtype):
    chex.assert_type(got, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    atol = 1e-5 if dtype == jnp.float32 else 0.1
    got = np.asarray(jnp.stack(got), np.float32)
    np.testing.assert_allclose(got, expected, atol=atol)


_F = 6
_TOKENS = jax.random.normal(jax.random.key(1), (2, 15, 4))


def _dense(layer, x):
  return x @ layer["kernel"] + layer.get("bias", 0)


def _mlp(params, x):
  hidden = _dense(params["up"], x)
  inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
  return _dense(params["down"], 0.5 * hidden * (1 + np.tanh(inner)))


def _swiglu(params, x):
  gate = _dense(params["gate"], x)
  hidden = gate / (1 + np.exp(-gate)) * _dense(params["up"], x)
  return _dense(params["down"], hidden)


_CASES = {
  "mlp": (MLP(_F), _mlp),
  "swiglu": (SwiGLU(_F), _swiglu),
  "swiglu_bias": (SwiGLU(_F, use_bias=True), _swiglu),
}


class FeedForwardTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_equals_the_formula_and_trains_every_parameter(self, name):
    module, formula = _CASES[name]
    variables = small.params(module, _TOKENS)
    first = variables["params"]["up" if name == "mlp" else "gate"]
    self.assertEqual("bias" in first, name != "swiglu")

    @jax.jit
    def run(variables):
      def loss(variables):
        out = module.apply(variables, _TOKENS)
        return jnp.sum(out**2), out

      return jax.grad(loss, has_aux=True)(variables)

    grads, out = run(variables)
    params = jax.tree.map(np.float64, variables["params"])
    expected = formula(params, np.float64(_TOKENS))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-4)
    chex.assert_tree_all_finite(grads)
    for leaf in jax.tree.leaves(grads):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)
    half = module.clone(dtype=jnp.bfloat16)
    x = _TOKENS.astype(jnp.bfloat16)
    chex.assert_type(jax.eval_shape(half.apply, variables, x), jnp.bfloat16)


class GradientsTest(parameterized.TestCase):
  def test_no_activations_are_transposed(self):
    """On a CPU such a copy takes a large part of the product's time."""
    module, x = MLP(56), jnp.ones((2, 24, 40))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))

    def loss(params):
      return jnp.sum(jax.nn.silu(module.apply(params, jnp.sin(x))) ** 2)

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    self.assertTrue("f32[48,56]" in text)  # the text is too long for a message
    self.assertFalse("f32[56,48]" in text or "f32[40,48]" in text)
