"""The loss that keeps routed heads evenly used."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops import routing


class BalanceLossTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    logits = jax.random.normal(jax.random.key(0), (2, 6, 4))
    self.probs = jax.nn.softmax(logits)
    self.selected = routing.top_k_mask(self.probs, 2)

  @parameterized.parameters(("released", 4.0), ("paper", 1.0))
  def test_equals_numpy_reference(self, form, factor):
    loss = routing.balance_loss(self.probs, self.selected, form=form)
    probs = np.asarray(self.probs, np.float64).reshape(12, 4)
    selected = np.asarray(self.selected).reshape(12, 4)
    expected = factor * sum(
      (selected[:, i].sum() / 12) * (probs[:, i].sum() / 12) for i in range(4)
    )
    chex.assert_shape(loss, ())
    chex.assert_type(loss, jnp.float32)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  @parameterized.parameters(("released", 2.0), ("paper", 0.5))
  def test_perfect_balance(self, form, expected):
    # Six tokens select each pair of four heads once; scores are uniform.
    pairs = [(i, j) for i in range(4) for j in range(i)]
    selected = np.zeros((1, 6, 4), bool)
    for token, pair in enumerate(pairs):
      selected[0, token, list(pair)] = True
    probs = jnp.full((1, 6, 4), 0.25)
    loss = routing.balance_loss(probs, jnp.asarray(selected), form=form)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  @parameterized.parameters("released", "paper")
  def test_collapsed_router_costs_the_most(self, form):
    probs = jnp.zeros((1, 6, 4)).at[..., 1].set(1.0)
    collapsed = routing.balance_loss(
      probs, routing.top_k_mask(probs, 2), form=form
    )
    spread = routing.balance_loss(self.probs, self.selected, form=form)
    self.assertGreater(float(collapsed), 1.2 * float(spread))

  @parameterized.parameters(("released", 4.0), ("paper", 1.0))
  def test_gradient_reaches_scores_weighted_by_frequency(self, form, factor):
    loss = functools.partial(
      routing.balance_loss, selected=self.selected, form=form
    )
    frequency = np.asarray(self.selected).mean((0, 1))
    expected = np.broadcast_to(factor * frequency / 12, self.probs.shape)
    np.testing.assert_allclose(jax.grad(loss)(self.probs), expected, rtol=1e-6)

  def test_gradient_of_logits_equals_finite_differences(self):
    logits = jax.random.normal(jax.random.key(1), (2, 3, 4))
    mask = routing.top_k_mask(logits, 2)
    frequency = np.asarray(mask, np.float64).mean((0, 1))

    def loss(logits):
      return routing.balance_loss(jax.nn.softmax(logits), mask)

    def reference(logits):
      probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
      return 4 * (frequency * probs.mean((0, 1))).sum()

    grads, values = jax.grad(loss)(logits), np.asarray(logits, np.float64)
    for element in np.ndindex(*logits.shape):
      step = np.zeros(logits.shape)
      step[element] = 1e-5
      slope = (reference(values + step) - reference(values - step)) / 2e-5
      np.testing.assert_allclose(grads[element], slope, atol=1e-7, rtol=1e-4)

  def test_token_mask_removes_padding(self):
    mask = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]], bool)
    loss = routing.balance_loss(self.probs, self.selected, token_mask=mask)
    expected = routing.balance_loss(
      self.probs[mask][None], self.selected[mask][None]
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  def test_masked_tokens_get_no_gradient(self):
    mask = jnp.arange(6)[None] < jnp.array([[4], [2]])
    loss = functools.partial(
      routing.balance_loss, selected=self.selected, token_mask=mask
    )
    grads = np.asarray(jax.grad(loss)(self.probs))
    np.testing.assert_array_equal(grads[~np.asarray(mask)], 0.0)
    self.assertGreater(np.abs(grads[np.asarray(mask)]).max(), 0.0)

  def test_no_counted_token_gives_zero(self):
    mask = jnp.zeros((2, 6), bool)
    loss = routing.balance_loss(self.probs, self.selected, token_mask=mask)
    self.assertEqual(float(loss), 0.0)

  def test_rejects_unequal_shapes(self):
    with self.assertRaises(AssertionError):
      routing.balance_loss(self.probs, self.selected[..., :3])


if __name__ == "__main__":
  absltest.main()
