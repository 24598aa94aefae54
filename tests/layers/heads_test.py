"""Per-head projections and the gated sum of heads."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.layers.heads import HeadMix, HeadProjection
from tests.layers import small


class HeadProjectionTest(parameterized.TestCase):
  @parameterized.product(
    parts=(1, 3), dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_projects_each_part_and_head(self, parts, dtype, use_bias):
    module = HeadProjection(parts, 2, 4, use_bias=use_bias, dtype=dtype)
    x = small.tokens()
    variables = small.params(module, x)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    stored = jax.tree.map(np.asarray, variables["params"])
    kernel = stored["kernel"]
    bias = stored.get("bias", np.zeros((parts, 2, 4)))
    vectors = module.apply(variables, x)
    self.assertLen(vectors, parts)
    for part, vector in enumerate(vectors):
      chex.assert_shape(vector, (small.B, small.N, 2, 4))
      chex.assert_type(vector, dtype)
      for head in range(2):
        expected = np.asarray(x) @ kernel[:, part, head] + bias[part, head]
        np.testing.assert_allclose(
          np.asarray(vector[:, :, head], np.float32),
          expected,
          atol=1e-5 if dtype == jnp.float32 else 0.1,
        )


class HeadMixTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(2)
    self.heads = jnp.asarray(
      rng.normal(size=(small.B, small.N, 6, 3)), jnp.float32
    )
    self.gates = jnp.asarray(
      rng.uniform(size=(small.B, small.N, 6)), jnp.float32
    )

  @parameterized.product(
    dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_equals_the_gated_sum_over_heads(self, dtype, use_bias):
    module = HeadMix(small.C, use_bias=use_bias, dtype=dtype)
    variables = small.params(module, self.heads, self.gates)
    stored = jax.tree.map(np.asarray, variables["params"])
    kernel = stored["kernel"]  # [H, D, C]
    expected = sum(
      np.asarray(self.gates[:, :, h, None] * self.heads[:, :, h]) @ kernel[h]
      for h in range(6)
    ) + stored.get("bias", np.zeros(small.C))
    out = module.apply(variables, self.heads, self.gates)
    chex.assert_shape(out, (small.B, small.N, small.C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    np.testing.assert_allclose(
      np.asarray(out, np.float32),
      expected,
      atol=1e-5 if dtype == jnp.float32 else 0.1,
    )

  def test_no_gates_equal_gates_of_one(self):
    module = HeadMix(small.C)
    variables = small.params(module, self.heads)
    chex.assert_trees_all_equal(
      module.apply(variables, self.heads),
      module.apply(variables, self.heads, jnp.ones_like(self.gates)),
    )

  def test_head_with_gate_zero_does_not_matter(self):
    module, gates = HeadMix(small.C), self.gates.at[:, :, 4].set(0.0)
    variables = small.params(module, self.heads, gates)
    chex.assert_trees_all_equal(
      module.apply(variables, self.heads, gates),
      module.apply(variables, self.heads.at[:, :, 4].add(7.0), gates),
    )

  def test_rejects_gates_of_another_head_count(self):
    with self.assertRaises(AssertionError):
      small.params(HeadMix(small.C), self.heads, self.gates[..., :5])


if __name__ == "__main__":
  absltest.main()
