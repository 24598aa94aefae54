"""Products with weights stored either way."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers.heads import HeadMix, HeadProjection
from moh_jax.layers.linear import Linear, xavier_init
from moh_jax.layers.moh import MoHAttention
from moh_jax.runtime.sharding import unbox
from tests.layers import small

_X = jax.random.normal(jax.random.key(0), (2, 3, 8))


def _params(module, x):
  params = unbox(module.init(jax.random.key(1), x)["params"])
  return jax.tree.map(lambda p: p + 0.1, params)  # biases begin at zero


class OutputMajorTest(parameterized.TestCase):
  """The same weights the other way round give the same result."""

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_linear(self, dtype):
    axes = ("embed", "mlp")
    plain = Linear(5, axes, dtype=dtype)
    turned = Linear(5, axes, dtype=dtype, output_major=True)
    params = _params(plain, _X)
    out = plain.apply({"params": params}, _X)
    params = {**params, "kernel": params["kernel"].T}
    again = turned.apply({"params": params}, _X)
    chex.assert_type(again, dtype)
    chex.assert_shape(again, (2, 3, 5))
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
    chex.assert_trees_all_close(out, again, atol=tolerance)

  def test_head_projection(self):
    plain = HeadProjection(2, 3, 4)
    turned = HeadProjection(2, 3, 4, output_major=True)
    params = _params(plain, _X)
    out = plain.apply({"params": params}, _X)
    params = {**params, "kernel": jnp.moveaxis(params["kernel"], 0, -1)}
    again = turned.apply({"params": params}, _X)
    chex.assert_trees_all_close(out, again, atol=1e-6)

  def test_head_mix(self):
    heads = _X.reshape(2, 3, 2, 4)
    gates = jax.random.uniform(jax.random.key(2), (2, 3, 2))
    plain, turned = HeadMix(5), HeadMix(5, output_major=True)
    params = _params(plain, heads)
    out = plain.apply({"params": params}, heads, gates)
    params = {**params, "kernel": jnp.moveaxis(params["kernel"], -1, 0)}
    again = turned.apply({"params": params}, heads, gates)
    chex.assert_trees_all_close(out, again, atol=1e-6)


class KernelInitTest(parameterized.TestCase):
  @parameterized.parameters(None, 2)
  def test_xavier_counts_the_fans_of_the_whole_matrix(self, kv_heads):
    budget = HeadBudget(num_heads=6, shared=3, top_k=1, head_dim=8)
    module = MoHAttention(
      budget, num_kv_heads=kv_heads, kernel_init=xavier_init
    )
    x = jnp.zeros((1, 1, 32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    fans = {
      "out": (48, 32),
      **({"q": (32, 48), "kv": (32, 32)} if kv_heads else {"qkv": (32, 144)}),
    }
    kernels = {name: params[name]["kernel"] for name in fans}
    fans |= {"routed": (32, 3), "shared": (32, 3), "group": (32, 2)}
    kernels |= params["router"]
    self.assertCountEqual(kernels, fans)
    for name, kernel in kernels.items():
      bound = np.sqrt(6 / sum(fans[name]))
      self.assertBetween(float(jnp.abs(kernel).max()), 0.9 * bound, bound, name)
      spread = 2 / np.sqrt(kernel.size)
      np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=spread)

  def test_default_is_the_same_deviation_everywhere(self):
    budget = HeadBudget(num_heads=6, shared=3, top_k=1, head_dim=8)
    module, x = MoHAttention(budget), jnp.zeros((1, 1, 32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    kernels = [params[name]["kernel"] for name in ("qkv", "out")]
    for kernel in (*kernels, *params["router"].values()):
      spread = 3 / np.sqrt(kernel.size)
      np.testing.assert_allclose(kernel.std(), 0.02, rtol=spread)

  def test_biases_start_at_zero(self):
    module = MoHAttention(small.BUDGET, kernel_init=xavier_init)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), small.tokens()))[
      "params"
    ]
    for name in ("qkv", "out"):
      np.testing.assert_array_equal(params[name]["bias"], 0.0)


if __name__ == "__main__":
  absltest.main()
