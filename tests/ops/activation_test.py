"""Exact GELU."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.basics import gelu


class GeluTest(parameterized.TestCase):
  def test_equals_the_gaussian_form(self):
    x = np.linspace(-6, 6, 241)
    phi = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    out = gelu(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, x * phi, atol=1e-6)

  def test_is_not_the_tanh_approximation(self):
    out = gelu(jnp.float32(2.5))
    tanh = jax.nn.gelu(jnp.float32(2.5), approximate=True)
    self.assertGreater(abs(float(out - tanh)), 1e-4)

  def test_gradient_is_cdf_plus_x_times_density(self):
    x = np.linspace(-5, 5, 41)
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    expected = cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    grads = jax.vmap(jax.grad(gelu))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(grads, expected, atol=1e-6)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_keeps_shape_and_dtype(self, dtype):
    out = gelu(jnp.ones((2, 3, 4), dtype))
    chex.assert_shape(out, (2, 3, 4))
    chex.assert_type(out, dtype)


if __name__ == "__main__":
  absltest.main()
