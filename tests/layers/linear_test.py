"""Products with weights stored either way."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.layers.linear import Linear
from moh_jax.layers.moh import LINEAR_INIT, HeadMix, HeadProjection
from moh_jax.runtime.params import unbox

_X = jax.random.normal(jax.random.key(0), (2, 3, 8))


def _params(module, x):
  params = unbox(module.init(jax.random.key(1), x)["params"])
  return jax.tree.map(lambda p: p + 0.1, params)  # biases begin at zero


class OutputMajorTest(parameterized.TestCase):
  """The same weights the other way round give the same result."""

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_linear(self, dtype):
    kinds = {"kernel_init": LINEAR_INIT, "dtype": dtype}
    plain = Linear(5, ("embed", "mlp"), **kinds)
    turned = Linear(5, ("embed", "mlp"), output_major=True, **kinds)
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


if __name__ == "__main__":
  absltest.main()
