"""The softmax whose division waits, and exact GELU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.ops.basics import gelu, unnormalized_softmax


class BasicsTest(parameterized.TestCase):
  def test_masked_row_gives_zero_and_the_rest_sums_to_one(self):
    logits = jnp.array([[-jnp.inf] * 3, [-jnp.inf, 2.0, 900.0]])
    weights, total, _ = unnormalized_softmax(logits, masked=True)
    np.testing.assert_array_equal(weights / total, [[0, 0, 0], [0, 0, 1]])

  def test_gelu_and_its_gradient_equal_the_gaussian_form(self):
    x = np.linspace(-6, 6, 241)
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    out, grads = jax.vmap(jax.value_and_grad(gelu))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, x * cdf, atol=1e-6)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(grads, cdf + x * density, atol=1e-6)
    self.assertEqual(gelu(jnp.ones(2, jnp.bfloat16)).dtype, jnp.bfloat16)
