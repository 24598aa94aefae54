"""Routing: the gates of the two-stage router, top-k masks, side values."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.heads import GATE_FORMS, HeadBudget
from moh_jax.ops import routing

_BATCH = (2, 5)
# (num_heads, shared, top_k): every legal corner of a head split.
_CORNERS = {
  "some_of_each": (6, 2, 2),
  "no_shared": (6, 0, 2),
  "no_shared_one_selected": (6, 0, 1),
  "one_shared": (6, 1, 3),
  "all_routed_selected": (6, 2, 4),
  "all_selected_no_shared": (6, 0, 6),
  "all_shared": (6, 6, 0),
  "none_selected": (6, 4, 0),
  "one_shared_none_selected": (6, 1, 0),
  "single_head": (1, 1, 0),
}
_CORNER_PARAMS = tuple({"corner": corner} for corner in _CORNERS)


def _budget(corner: str) -> HeadBudget:
  return HeadBudget(*_CORNERS[corner], head_dim=4)


def _logits(budget: HeadBudget, two_stage: bool = True) -> dict:
  """Random logits of the router matrices that such a layer has."""
  sizes = {
    "routed_logits": budget.routed if budget.top_k else 0,
    "shared_logits": budget.shared if budget.shared > 1 else 0,
    "group_logits": 2 if two_stage and budget.shared and budget.top_k else 0,
  }
  rng = np.random.default_rng(0)
  values = {name: rng.normal(size=(*_BATCH, 6)) for name in sizes}
  return {
    name: jnp.asarray(values[name][..., :size], jnp.float32) if size else None
    for name, size in sizes.items()
  }


def _route(budget: HeadBudget, logits: dict, form: str) -> routing.Routing:
  return routing.two_stage_gates(
    budget=budget, batch_shape=_BATCH, form=form, **logits
  )


class UnderflowTest(parameterized.TestCase):
  """Logits so far apart that most probabilities are 0 in float32."""

  @parameterized.parameters(*GATE_FORMS)
  def test_heads_are_chosen_by_logits(self, form):
    budget = HeadBudget(6, 1, 2, head_dim=4)
    logits = jnp.float32([1000.0, 0.0, -500.0, 300.0, 300.0])
    decided = routing.two_stage_gates(
      budget=budget,
      routed_logits=jnp.broadcast_to(logits, (*_BATCH, 5)),
      shared_logits=None,
      group_logits=None,
      batch_shape=_BATCH,
      form=form,
    )
    want = [True, False, False, True, False]  # of equal logits the first
    np.testing.assert_array_equal(
      decided.selected, np.broadcast_to(want, (*_BATCH, 5))
    )
    aux = routing.router_aux(decided, budget, form=form)
    np.testing.assert_array_equal(aux.load, [True, *want])


class TopPTest(parameterized.TestCase):
  @parameterized.parameters(0.2, 0.5, 0.9)
  def test_selects_until_scores_reach_p(self, p):
    rng = np.random.default_rng(0)
    probs = np.float32(rng.dirichlet(np.ones(6), (2, 5)))
    found = np.asarray(routing.top_p_mask(jnp.asarray(probs), p))
    for index in np.ndindex(2, 5):
      order = np.argsort(-probs[index], kind="stable")
      sums = np.cumsum(probs[index][order])
      wanted = order[: 1 + int((sums < p).sum())]
      self.assertCountEqual(np.flatnonzero(found[index]), wanted)

  def test_1_selects_all_heads_whatever_rounding_does(self):
    # The first two add up to 1 in float32, though the third is above 0.
    probs = jnp.float32([[0.5, 0.5, 1e-9]])
    self.assertTrue(np.asarray(routing.top_p_mask(probs, 1.0)).all())

  @parameterized.parameters("released", "paper", "query_norm")
  def test_a_number_at_run_time_is_used_instead(self, form):
    budget = HeadBudget(6, 2, 2, 4)
    if form == "query_norm":
      norms = jnp.arange(60, dtype=jnp.float32).reshape(2, 5, 6)
      route = functools.partial(routing.query_norm_gates, norms, budget)
    else:
      route = functools.partial(
        routing.two_stage_gates,
        **{"budget": budget, "batch_shape": _BATCH, "form": form},
        **_logits(budget),
      )
    found = route(top_k=jnp.int32(3), top_p=1e-6)
    np.testing.assert_array_equal(found.selected.sum(-1), 3)
    np.testing.assert_array_equal(found.gates, route(top_k=jnp.int32(3)).gates)

  @parameterized.product(form=GATE_FORMS, most=(False, True))
  def test_ends_are_one_head_and_all(self, form, most):
    budget = HeadBudget(6, 2, 4 if most else 1, 4)
    logits = _logits(budget)
    found = routing.two_stage_gates(
      **{"budget": HeadBudget(6, 2, 2, 4), "batch_shape": _BATCH},
      **{"form": form, "top_p": 1.0 if most else 1e-6, **logits},
    )
    expected = _route(budget, logits, form)
    np.testing.assert_allclose(found.gates, expected.gates, rtol=1e-6)

  def test_norms_of_queries(self):
    norms = jnp.asarray(np.random.default_rng(0).random((2, 5, 6)), jnp.float32)
    budget = HeadBudget(6, 2, 2, 4)
    found = routing.query_norm_gates(norms, budget, top_p=1e-6)
    expected = routing.query_norm_gates(norms, HeadBudget(6, 2, 1, 4))
    np.testing.assert_allclose(found.gates, expected.gates)


def _softmax(x) -> np.ndarray:
  e = np.exp(np.asarray(x, np.float64) - np.max(x))
  return e / e.sum()


def _token_gates(budget, routed, shared, group, form) -> np.ndarray:
  """One token's gates from the formulas, head by head, float64."""
  s, k, released = budget.shared, budget.top_k, form == "released"
  a, b = (0.5, 0.5) if group is None else _softmax(group)
  gates = np.zeros(budget.num_heads)
  scores = [1.0] if shared is None else _softmax(shared)
  for head in range(s):
    gate = scores[head] * (s if released else 1)
    gates[head] = gate * (2 * a if released else a) if k else gate
  if k:
    p = _softmax(routed)
    chosen = sorted(range(budget.routed), key=lambda head: -p[head])[:k]
    for head in chosen:
      gate = k * p[head] / p[chosen].sum() if released else p[head]
      gates[s + head] = gate * (2 * b if released else b) if s else gate
  return gates


def _reference(budget: HeadBudget, logits: dict, form: str) -> np.ndarray:
  gates = np.zeros((*_BATCH, budget.num_heads))
  for token in np.ndindex(*_BATCH):
    routed, shared, group = (
      None if x is None else np.asarray(x[token]) for x in logits.values()
    )
    gates[token] = _token_gates(budget, routed, shared, group, form)
  return gates


class TwoStageGatesTest(parameterized.TestCase):
  @parameterized.product(
    corner=tuple(_CORNERS),
    form=GATE_FORMS,
    two_stage=(True, False),
  )
  def test_equals_numpy_reference(self, corner, form, two_stage):
    budget = _budget(corner)
    logits = _logits(budget, two_stage)
    gates = _route(budget, logits, form).gates
    np.testing.assert_allclose(
      gates, _reference(budget, logits, form), atol=2e-6
    )

  @parameterized.product(corner=tuple(_CORNERS), form=GATE_FORMS)
  def test_gates_are_positive_exactly_where_selected(self, corner, form):
    budget = _budget(corner)
    routed = _route(budget, _logits(budget), form)
    on = np.ones((*_BATCH, budget.shared), bool)
    expected = np.concatenate([on, routed.selected], axis=-1)
    np.testing.assert_array_equal(np.asarray(routed.gates) > 0, expected)
    np.testing.assert_array_equal(np.asarray(routed.gates)[~expected], 0.0)

  @parameterized.parameters(*_CORNER_PARAMS)
  def test_selects_exactly_top_k(self, corner):
    budget = _budget(corner)
    selected = _route(budget, _logits(budget), "released").selected
    counts = np.asarray(selected).sum(-1)
    np.testing.assert_array_equal(counts, np.full(_BATCH, budget.top_k))

  def test_ties_select_the_lowest_index(self):
    budget = _budget("some_of_each")
    logits = _logits(budget) | {"routed_logits": jnp.zeros((*_BATCH, 4))}
    selected = _route(budget, logits, "released").selected
    expected = np.broadcast_to([True, True, False, False], (*_BATCH, 4))
    np.testing.assert_array_equal(selected, expected)

  @parameterized.product(corner=tuple(_CORNERS), two_stage=(True, False))
  def test_uniform_released_router_gives_active_heads_one(
    self, corner, two_stage
  ):
    budget = _budget(corner)
    logits = jax.tree.map(jnp.zeros_like, _logits(budget, two_stage))
    gates = np.asarray(_route(budget, logits, "released").gates)
    active = gates != 0
    np.testing.assert_array_equal(active.sum(-1), budget.active)
    np.testing.assert_allclose(gates[active], 1.0, rtol=1e-6)

  def test_missing_shared_logits_weigh_shared_heads_alike(self):
    budget = _budget("all_shared")
    logits = {k: None for k in _logits(budget)}
    gates = _route(budget, logits, "paper").gates
    np.testing.assert_allclose(gates, 1 / 6, rtol=1e-6)

  @parameterized.product(
    corner=tuple(_CORNERS), dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_shapes_and_float32_whatever_the_logits(self, corner, dtype):
    budget = _budget(corner)
    logits = jax.tree.map(lambda x: x.astype(dtype), _logits(budget))
    routed = _route(budget, logits, "released")
    chex.assert_shape(routed.gates, (*_BATCH, budget.num_heads))
    chex.assert_shape(routed.probs, (*_BATCH, budget.routed))
    chex.assert_shape(routed.selected, (*_BATCH, budget.routed))
    chex.assert_shape(routed.shared_scores, (*_BATCH, budget.shared))
    floats = (routed.gates, routed.probs, routed.shared_scores)
    chex.assert_type(floats, jnp.float32)
    chex.assert_type(routed.selected, jnp.bool_)

  def test_bfloat16_logits_are_rounded_once(self):
    budget = _budget("some_of_each")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _logits(budget))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    chex.assert_trees_all_equal(
      _route(budget, rounded, "released"), _route(budget, exact, "released")
    )

  @parameterized.product(
    corner=("some_of_each", "no_shared", "all_shared"), form=GATE_FORMS
  )
  def test_gradient_equals_finite_differences(self, corner, form):
    budget = _budget(corner)
    logits = _logits(budget)
    cotangent = np.random.default_rng(1).normal(size=(*_BATCH, 6))

    def objective(logits):
      return jnp.sum(_route(budget, logits, form).gates * cotangent)

    grads = jax.grad(objective)(logits)
    eps = 1e-5
    for name, values in logits.items():
      if values is None:
        continue
      values = np.asarray(values, np.float64)
      for element in [(0, 0, 0), (1, 3, 1), (1, 4, values.shape[-1] - 1)]:
        ends = []
        for step in (-eps, eps):
          moved = values.copy()
          moved[element] += step
          gates = _reference(budget, logits | {name: moved}, form)
          ends.append((gates * cotangent).sum())
        expected = (ends[1] - ends[0]) / (2 * eps)
        np.testing.assert_allclose(grads[name][element], expected, atol=1e-5)


class TransformsTest(parameterized.TestCase):
  """Routing has no hidden state: it works under every transformation."""

  def setUp(self):
    super().setUp()
    self.budget = _budget("some_of_each")
    self.logits = _logits(self.budget)

  def _route(self, logits):
    routed = _route(self.budget, logits, "released")
    return routed, routing.router_aux(routed, self.budget)

  def _objective(self, logits):
    routed, aux = self._route(logits)
    return jnp.sum(jnp.sin(routed.gates)) + aux.balance_loss

  def test_jit_equals_eager(self):
    chex.assert_trees_all_close(
      jax.jit(self._route)(self.logits), self._route(self.logits), rtol=1e-6
    )

  def test_gradient_equals_the_jitted_one(self):
    grads = jax.grad(self._objective)(self.logits)
    chex.assert_tree_all_finite(grads)
    jitted = jax.jit(jax.grad(self._objective))(self.logits)
    chex.assert_trees_all_close(grads, jitted, atol=1e-6)

  def test_rematerialized_gradient_equals_the_plain_one(self):
    chex.assert_trees_all_close(
      jax.jit(jax.grad(jax.checkpoint(self._objective)))(self.logits),
      jax.jit(jax.grad(self._objective))(self.logits),
      atol=1e-6,
    )

  def test_scan_over_layers_equals_a_loop(self):
    layers = [
      jax.tree.map(lambda x, c=c: x * c, self.logits) for c in (1.0, -1.0, 2.0)
    ]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)

    def total(stacked):
      step = lambda carry, logits: (carry, self._objective(logits))  # noqa: E731
      return jax.lax.scan(step, None, stacked)[1].sum()

    value, grads = jax.jit(jax.value_and_grad(total))(stacked)
    loop = [jax.value_and_grad(self._objective)(x) for x in layers]
    np.testing.assert_allclose(value, sum(v for v, _ in loop), rtol=1e-6)
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *[g for _, g in loop])
    chex.assert_trees_all_close(grads, expected, atol=1e-6)


class TopKMaskTest(parameterized.TestCase):
  @parameterized.product(k=(0, 1, 3, 6), dtype=(jnp.float32, jnp.bfloat16))
  def test_marks_the_k_best(self, k, dtype):
    scores = jax.random.normal(jax.random.key(0), (2, 5, 6)).astype(dtype)
    mask = routing.top_k_mask(scores, k)
    chex.assert_shape(mask, (2, 5, 6))
    chex.assert_type(mask, jnp.bool_)
    order = np.argsort(-np.asarray(scores, np.float32), -1, kind="stable")
    expected = np.zeros((2, 5, 6), bool)
    np.put_along_axis(expected, order[..., :k], True, axis=-1)
    np.testing.assert_array_equal(mask, expected)

  @parameterized.parameters(-1, 7)
  def test_rejects_k_outside_the_heads(self, k):
    with self.assertRaisesRegex(ValueError, rf"k={k} .*\[0, 6\]"):
      routing.top_k_mask(jnp.zeros((2, 6)), k)

  @parameterized.parameters(1, 2, 4, 6)
  def test_traced_k_marks_the_same_as_a_static_one(self, k):
    # Whole numbers: many ties.
    scores = jax.random.randint(jax.random.key(0), (3, 5, 6), 0, 3)
    mask = jax.jit(routing.top_k_mask)(scores.astype(jnp.float32), k)
    expected = routing.top_k_mask(scores.astype(jnp.float32), k)
    chex.assert_type(mask, jnp.bool_)
    np.testing.assert_array_equal(mask, expected)


class TracedTopKTest(parameterized.TestCase):
  """`top_k` as an array routes as a budget of that `top_k`."""

  @parameterized.product(shared=(0, 2), form=GATE_FORMS)
  def test_two_stage_gates_are_those_of_the_budget(self, shared, form):
    budget = HeadBudget(4 + shared, shared, 3, head_dim=4)
    logits = _logits(budget)

    @jax.jit
    def route(top_k):
      return routing.two_stage_gates(
        budget=budget, batch_shape=_BATCH, form=form, top_k=top_k, **logits
      )

    for k in (1, 2, 4):
      static = _route(HeadBudget(4 + shared, shared, k, 4), logits, form)
      chex.assert_trees_all_close(route(jnp.int32(k)), static, rtol=1e-6)

  @parameterized.parameters("selected", "all")
  def test_query_norm_gates_and_gradients_are_those_of_the_budget(
    self, straight_through
  ):
    norms = jax.random.uniform(jax.random.key(0), (*_BATCH, 6))
    weight = jax.random.normal(jax.random.key(1), norms.shape)

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=1, has_aux=True)
    def run(k, norms, top_k=None):
      budget = HeadBudget(6, 2, k, 4)
      routed = routing.query_norm_gates(
        norms, budget, straight_through=straight_through, top_k=top_k
      )
      return jnp.sum(weight * routed.gates), routed

    for k in (1, 4):
      traced, static = run(3, norms, jnp.int32(k)), run(k, norms)
      chex.assert_trees_all_close(traced, static, rtol=1e-6, atol=1e-6)

  @parameterized.parameters("all_shared", "none_selected")
  def test_layer_that_routes_nothing_ignores_it(self, corner):
    budget = _budget(corner)
    logits = _logits(budget)
    routed = routing.two_stage_gates(
      budget=budget, batch_shape=_BATCH, top_k=jnp.int32(1), **logits
    )
    chex.assert_trees_all_equal(routed, _route(budget, logits, "released"))
    norms = jnp.arange(1.0, 7.0)[None, None]
    chex.assert_trees_all_equal(
      routing.query_norm_gates(norms, budget, top_k=jnp.int32(1)),
      routing.query_norm_gates(norms, budget),
    )


class RouterAuxTest(parameterized.TestCase):
  @parameterized.product(corner=tuple(_CORNERS), form=GATE_FORMS)
  def test_shapes_load_and_share(self, corner, form):
    budget = _budget(corner)
    routed = _route(budget, _logits(budget), form)
    aux = routing.router_aux(routed, budget, form=form)
    chex.assert_shape(aux.balance_loss, ())
    chex.assert_shape([aux.load, aux.mean_score], (budget.num_heads,))
    chex.assert_type(jax.tree.leaves(aux), jnp.float32)
    np.testing.assert_allclose(aux.load[: budget.shared], 1.0)
    np.testing.assert_allclose(aux.load.sum(), budget.active, rtol=1e-6)
    np.testing.assert_allclose(aux.load.mean(), budget.share, rtol=1e-6)
    self.assertEqual(aux.routed, budget.top_k > 0)

  @parameterized.parameters("all_shared", "none_selected", "single_head")
  def test_nothing_routed_costs_nothing(self, corner):
    budget = _budget(corner)
    routed = _route(budget, _logits(budget), "released")
    self.assertEqual(routing.router_aux(routed, budget).balance_loss, 0.0)

  def test_mean_scores_sum_to_one_per_group(self):
    budget = _budget("some_of_each")
    routed = _route(budget, _logits(budget), "released")
    score = routing.router_aux(routed, budget).mean_score
    np.testing.assert_allclose(score[:2].sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(score[2:].sum(), 1.0, rtol=1e-6)

  def test_statistics_count_only_unmasked_tokens(self):
    budget = _budget("some_of_each")
    routed = _route(budget, _logits(budget), "released")
    mask = jnp.arange(5)[None] < jnp.array([[3], [1]])
    kept = jax.tree.map(lambda x: x[mask][None], routed)
    chex.assert_trees_all_close(
      routing.router_aux(routed, budget, token_mask=mask),
      routing.router_aux(kept, budget),
      rtol=1e-6,
    )

  @parameterized.parameters("load", "mean_score")
  def test_statistics_carry_no_gradient(self, field):
    budget = _budget("some_of_each")

    def statistic(logits):
      aux = routing.router_aux(_route(budget, logits, "released"), budget)
      return jnp.sum(getattr(aux, field) ** 2)

    grads = jax.grad(statistic)(_logits(budget))
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, grads))

  def test_all_heads_aux(self):
    aux = routing.all_heads_aux(3)
    chex.assert_shape([aux.load, aux.mean_score], (3,))
    chex.assert_type(jax.tree.leaves(aux), jnp.float32)
    self.assertEqual(float(aux.balance_loss), 0.0)
    self.assertFalse(aux.routed)
    np.testing.assert_array_equal(aux.load, 1.0)

  def test_token_mean_of_bfloat16_is_float32(self):
    x = jnp.ones((2, 300, 3), jnp.bfloat16)
    mean = routing.token_mean(x)
    chex.assert_shape(mean, (3,))
    chex.assert_type(mean, jnp.float32)
    np.testing.assert_allclose(mean, 1.0)


if __name__ == "__main__":
  absltest.main()
