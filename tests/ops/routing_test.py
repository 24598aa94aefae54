"""Routing: gates of both routers, masks of the best heads, side values."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from scipy import special

from moh_jax.config.heads import HeadBudget
from moh_jax.ops import routing

_BATCH = (2, 5)
# (num_heads, shared, top_k): every legal corner of a head split.
GATE_FORMS = ("released", "paper")
_CORNERS = {
  "some_of_each": (6, 2, 2),
  "no_shared": (6, 0, 2),
  "one_shared": (6, 1, 3),
  "all_routed_selected": (6, 2, 4),
  "all_shared": (6, 6, 0),
  "none_selected": (6, 4, 0),
  "single_head": (1, 1, 0),
}


def _budget(corner: str) -> HeadBudget:
  return HeadBudget(*_CORNERS[corner], head_dim=4)


def _logits(budget: HeadBudget, two_stage: bool = True) -> dict:
  """Random logits of the router matrices that such a layer has."""
  sizes = {
    "routed": budget.routed if budget.top_k else 0,
    "shared": budget.shared if budget.shared > 1 else 0,
    "group": 2 if two_stage and budget.shared and budget.top_k else 0,
  }
  rng = np.random.default_rng(0)
  values = {name: rng.normal(size=(*_BATCH, 6)) for name in sizes}
  return {
    name: jnp.asarray(values[name][..., :size], jnp.float32)
    for name, size in sizes.items()
    if size
  }


def _route(budget, logits, form="released", **options) -> routing.Routing:
  return routing.two_stage_gates(logits, budget, _BATCH, form=form, **options)


def _reference(budget: HeadBudget, logits: dict, form: str) -> np.ndarray:
  """Gates by the formulas, in float64."""
  shared, k, released = budget.shared, budget.top_k, form == "released"
  scores = {x: special.softmax(np.float64(logits[x]), -1) for x in logits}
  first = scores.get("shared", np.ones((*_BATCH, shared)))
  first = first * (shared if released else 1)
  rest = scores.get("routed", np.zeros((*_BATCH, budget.routed)))
  if k:
    rest = np.where(rest >= np.sort(rest)[..., -k, None], rest, 0)
    rest = rest * k / rest.sum(-1, keepdims=True) if released else rest
  if k and shared:
    weights = scores.get("group", np.full((*_BATCH, 2), 0.5))
    weights = weights * (2 if released else 1)
    first, rest = first * weights[..., :1], rest * weights[..., 1:]
  return np.concatenate([first, rest], -1)


class TwoStageGatesTest(parameterized.TestCase):
  @parameterized.parameters(
    *((corner, form, True) for corner in _CORNERS for form in GATE_FORMS),
    *(("some_of_each", form, False) for form in GATE_FORMS),
  )
  def test_gates_and_statistics_equal_numpy(self, corner, form, two_stage):
    budget = _budget(corner)
    logits = _logits(budget, two_stage)
    routed = _route(budget, logits, form)
    expected = _reference(budget, logits, form)
    np.testing.assert_allclose(routed.gates, expected, atol=2e-6)
    on = np.ones((*_BATCH, budget.shared), bool)
    on = np.concatenate([on, routed.selected], axis=-1)
    np.testing.assert_array_equal(np.asarray(routed.gates) != 0, on)
    np.testing.assert_array_equal(on.sum(-1), budget.active)
    aux = routing.router_aux(routed, budget, form=form)
    np.testing.assert_allclose(aux.load, on.mean((0, 1)), rtol=1e-6)
    self.assertEqual(aux.routed, budget.top_k > 0)
    if not budget.top_k:
      self.assertEqual(aux.balance_loss, 0.0)
    scores = [routed.shared_scores, routed.probs]
    chex.assert_type([routed.gates, *scores, *jax.tree.leaves(aux)], "float32")
    scores = np.concatenate(scores, -1).mean((0, 1))
    np.testing.assert_allclose(aux.mean_score, scores, rtol=1e-5)

  @parameterized.parameters(*GATE_FORMS)
  def test_heads_are_chosen_by_logits_that_underflow(self, form):
    budget = HeadBudget(6, 1, 2, head_dim=4)
    logits = jnp.float32([1000.0, 0.0, -500.0, 300.0, 300.0])
    logits = jnp.broadcast_to(logits, (*_BATCH, 5))
    decided = _route(budget, {"routed": logits}, form)
    want = [True, False, False, True, False]  # of equal logits the first
    want = np.broadcast_to(want, (*_BATCH, 5))
    np.testing.assert_array_equal(decided.selected, want)


class MasksTest(parameterized.TestCase):
  @parameterized.product(k=(0, 1, 3, 6), dtype=(jnp.float32, jnp.bfloat16))
  def test_marks_the_k_best(self, k, dtype):
    # Whole numbers: many ties, of which the first count.
    scores = jax.random.randint(jax.random.key(0), (2, 5, 6), 0, 4)
    scores = scores.astype(dtype)
    order = np.argsort(-np.asarray(scores, np.float32), -1, kind="stable")
    expected = np.zeros((2, 5, 6), bool)
    np.put_along_axis(expected, order[..., :k], True, axis=-1)
    for given in (k, jnp.int32(k)):
      np.testing.assert_array_equal(routing.top_k_mask(scores, given), expected)


class AtRunTimeTest(parameterized.TestCase):
  # Other layers are those of layers/structures_test and models/llm_test.
  @parameterized.parameters(*GATE_FORMS)
  def test_gates_are_those_of_a_budget_of_that_top_k(self, form):
    logits = _logits(_budget("some_of_each"))
    routed = _route(_budget("some_of_each"), logits, form, top_k=jnp.int32(3))
    expected = _reference(HeadBudget(6, 2, 3, head_dim=4), logits, form)
    np.testing.assert_allclose(routed.gates, expected, atol=2e-6)

  @parameterized.parameters("all_shared", "none_selected")
  def test_layer_that_routes_nothing_ignores_it(self, corner):
    budget, one = _budget(corner), jnp.int32(1)
    logits, norms = _logits(budget), jnp.arange(1.0, 7.0)[None, None]
    gates = functools.partial(routing.query_norm_gates, norms, budget)
    chex.assert_trees_all_equal(
      (_route(budget, logits, top_k=one), gates(top_k=one)),
      (_route(budget, logits), gates()),
    )


class BalanceLossTest(parameterized.TestCase):
  @parameterized.product(form=GATE_FORMS, masked=(False, True))
  def test_value_and_gradient_equal_numpy(self, form, masked):
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 6, 4)))
    selected = routing.top_k_mask(probs, 2)
    mask = np.arange(6)[None] < np.array([[4], [2]]) if masked else None
    counted = np.ones((2, 6), bool) if mask is None else mask
    budget = HeadBudget(5, shared=1, top_k=2, head_dim=4)

    def loss_of(probs, mask):
      zeros = jnp.zeros_like(probs)
      routed = routing.beside_shared(budget, zeros, probs, selected)
      how = {"token_mask": mask, "form": form}
      return routing.router_aux(routed, budget, **how).balance_loss

    loss, grad = jax.value_and_grad(loss_of)(probs, mask)
    factor = 4.0 if form == "released" else 1.0
    share = np.asarray(selected)[counted].mean(0)
    mean = np.asarray(probs, np.float64)[counted].mean(0)
    np.testing.assert_allclose(loss, factor * share @ mean, rtol=1e-6)
    expected = factor * share / counted.sum() * counted[..., None]
    np.testing.assert_allclose(grad, expected, rtol=1e-6)
    self.assertEqual(float(loss_of(probs, np.zeros((2, 6), bool))), 0.0)


def _by_norm(norms, weights, shared=0, top_k=1, kind="selected"):
  """Routes one token by the norms of its heads: its gradient and routing."""
  norms, weights = np.float32(norms), np.float32(weights)
  budget = HeadBudget(len(norms), shared, top_k, head_dim=4)

  @jax.jit
  def total(norms):
    routed = routing.query_norm_gates(
      norms[None, None], budget, straight_through=kind
    )
    return jnp.sum(routed.gates * weights[None, None]), routed

  grads, routed = jax.grad(total, has_aux=True)(norms)
  return grads, jax.tree.map(lambda x: x[0, 0], routed)


class QueryNormGatesTest(parameterized.TestCase):
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

  def test_norms_are_float32_and_their_gradients_finite(self):
    queries = jax.random.normal(jax.random.key(0), (2, 3, 4, 8), jnp.bfloat16)
    norms = routing.query_norms(queries)
    chex.assert_type(norms, jnp.float32)
    expected = np.linalg.norm(np.asarray(queries, np.float64), axis=-1)
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    grads = jax.grad(lambda q: routing.query_norms(q).sum())(0 * queries)
    np.testing.assert_array_equal(grads, 0.0)
