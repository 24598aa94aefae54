"""Gates from the norms of queries."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from scipy import special

from moh_jax.config.heads import HeadBudget
from moh_jax.ops import routing

_BATCH = (2, 5)


@functools.partial(jax.jit, static_argnames=("shared", "top_k", "kind"))
def _norm_call(norms, weights, shared, top_k, kind):
  """Gradient of the weighted sum of gates [H], and the routing."""
  budget = HeadBudget(len(norms), shared, top_k, head_dim=4)

  def total(norms):
    routed = routing.query_norm_gates(
      norms[None, None], budget, straight_through=kind
    )
    return jnp.sum(routed.gates * weights[None, None]), routed

  return jax.grad(total, has_aux=True)(norms)


def _by_norm(norms, weights=None, shared=0, top_k=1, kind="selected"):
  """Routes one token by the norms of its heads: its gradient and routing."""
  norms = np.float32(norms)
  weights = np.zeros_like(norms) if weights is None else np.float32(weights)
  grads, routed = _norm_call(norms, weights, shared, top_k, kind)
  return np.asarray(grads), jax.tree.map(lambda x: np.asarray(x)[0, 0], routed)


class QueryNormGatesTest(parameterized.TestCase):
  def test_scores_are_the_softmax_of_norms_over_their_deviation(self):
    # Routed norms 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14,
    # over 3 (Bessel) for the variance.
    _, routed = _by_norm([5, 1, 2, 3, 6], shared=1, top_k=2)
    expected = special.softmax(np.array([1, 2, 3, 6]) / np.sqrt(14 / 3))
    np.testing.assert_allclose(routed.probs, expected, rtol=1e-6)
    np.testing.assert_array_equal(routed.selected, [False, False, True, True])
    np.testing.assert_array_equal(routed.gates, [1, 0, 0, 1, 1])
    np.testing.assert_array_equal(routed.shared_scores, [1])

  @parameterized.parameters(
    (0, 1, "all"),
    (2, 2, "all"),
    (2, 2, "selected"),
    (1, 5, "all"),
    (6, 0, "selected"),
    (2, 0, "all"),
  )
  def test_gates_are_exactly_one_for_the_largest_norms_and_zero_else(
    self, shared, top_k, kind
  ):
    norms = jax.random.uniform(jax.random.key(0), (*_BATCH, 6))
    budget = HeadBudget(6, shared, top_k, head_dim=4)
    route = jax.jit(
      lambda n: routing.query_norm_gates(n, budget, straight_through=kind)
    )
    routed = route(norms)
    order = np.argsort(-np.asarray(norms[..., shared:]), -1)
    expected = np.zeros((*_BATCH, 6), np.float32)
    expected[..., :shared] = 1
    np.put_along_axis(expected, shared + order[..., :top_k], 1, axis=-1)
    np.testing.assert_array_equal(routed.gates, expected)
    chex.assert_type(routed.gates, jnp.float32)
    np.testing.assert_array_equal(routed.selected, expected[..., shared:] == 1)

  def test_norms_of_shared_heads_do_not_matter(self):
    _, ours = _by_norm([9, 1, 2, 4], shared=1)
    _, theirs = _by_norm([0, 1, 2, 4], shared=1)
    chex.assert_trees_all_equal(ours, theirs)

  def test_scale_of_the_norms_does_not_matter(self):
    (_, small), (_, large) = (
      _by_norm(scale * np.array([1, 2, 4]), top_k=2) for scale in (1e-3, 1e3)
    )
    chex.assert_trees_all_close(small, large, rtol=1e-5)

  def test_straight_through_gradients_equal_a_hand_computed_case(self):
    # Routed norms n = 1, 2, 3: mean 2, deviation s = sqrt((1 + 0 + 1) / 2) = 1,
    # so the logits z = n / s are 1, 2, 3 and the scores P = exp(z) / sum.
    # The objective is sum_i c_i gate_i with c = 1, 2, 4; a gate counts as its
    # score where it passes, so with g_i = c_i there and 0 else,
    #   G_j = dL/dz_j = P_j (g_j - sum_i g_i P_i).
    # ds/dn_j = (n_j - mean) / ((R - 1) s) = -1/2, 0, 1/2, so
    #   dL/dn_j = G_j / s - sum_i G_i n_i / s**2 * ds/dn_j.
    # "selected", top_k = 1: g = 0, 0, 4. P = 0.0900306, 0.2447285, 0.6652410;
    # sum g P = 2.6609638; G = -0.2395679, -0.6512136, 0.8907815;
    # sum G n = 1.1303493; dL/dn = 0.3256068, -0.6512136, 0.3256068.
    # "all": g = 1, 2, 4; sum g P = 3.2404514; G = -0.2017092, -0.3035741,
    # 0.5052833; sum G n = 0.7069926; dL/dn = 0.1517871, -0.3035741, 0.1517870.
    for straight_through, expected in (
      ("selected", [0.3256068, -0.6512136, 0.3256068]),
      ("all", [0.1517871, -0.3035741, 0.1517870]),
    ):
      grads, _ = _by_norm(
        [7, 1, 2, 3], [5, 1, 2, 4], shared=1, kind=straight_through
      )
      np.testing.assert_allclose(grads, [0.0, *expected], atol=2e-6)

  def test_only_all_learns_from_heads_that_were_not_chosen(self):
    for kind, learns in (("selected", False), ("all", True)):
      grads, _ = _by_norm([1, 2, 4], [3, -2, 0], kind=kind)  # 4 is chosen
      self.assertEqual(bool(np.abs(grads).max() > 0.1), learns)

  @parameterized.parameters("selected", "all")
  def test_one_routed_head_is_always_on(self, kind):
    grads, routed = _by_norm([1, 2, 3], [1, 2, 3], shared=2, kind=kind)
    np.testing.assert_array_equal(routed.gates, [1, 1, 1])
    np.testing.assert_array_equal(routed.probs, [1])
    np.testing.assert_array_equal(grads, 0.0)

  @parameterized.parameters(0.0, 1e-3, 0.3, 1e4)
  def test_equal_norms_have_uniform_scores_and_finite_gradients(self, norm):
    grads, routed = _by_norm(np.full(5, norm), np.arange(5), top_k=2)
    np.testing.assert_allclose(routed.probs, 0.2, rtol=1e-6)
    np.testing.assert_array_equal(routed.gates, [1, 1, 0, 0, 0])
    self.assertTrue(np.isfinite(grads).all())

  def test_balance_loss_is_that_of_the_scores(self):
    norms = jax.random.uniform(jax.random.key(0), (*_BATCH, 6))
    budget = HeadBudget(6, 2, 2, head_dim=4)
    routed = routing.query_norm_gates(norms, budget)
    aux = routing.router_aux(routed, budget)
    expected = routing.balance_loss(routed.probs, routed.selected)
    np.testing.assert_allclose(aux.balance_loss, expected, rtol=1e-6)
    np.testing.assert_allclose(aux.load.sum(), 4.0, rtol=1e-6)


class QueryNormsTest(absltest.TestCase):
  def test_are_the_lengths_of_the_queries_in_float32(self):
    queries = jax.random.normal(jax.random.key(0), (2, 3, 4, 8), jnp.bfloat16)
    norms = routing.query_norms(queries)
    chex.assert_type(norms, jnp.float32)
    expected = np.linalg.norm(np.asarray(queries, np.float64), axis=-1)
    np.testing.assert_allclose(norms, expected, rtol=1e-6)

  def test_zero_queries_have_finite_gradients(self):
    budget = HeadBudget(4, 1, 2, head_dim=8)
    queries = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    queries = queries.at[1].set(0.0)

    def total(queries):
      gates = routing.query_norm_gates(
        routing.query_norms(queries), budget, straight_through="all"
      ).gates
      return jnp.sum(gates * jnp.arange(4.0)[None, None])

    grads = jax.jit(jax.grad(total))(queries)
    chex.assert_tree_all_finite(grads)
    np.testing.assert_array_equal(grads[1], 0.0)
    self.assertGreater(float(jnp.abs(grads[0]).max()), 0.0)


if __name__ == "__main__":
  absltest.main()
