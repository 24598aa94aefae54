"""The router: gates, statistics, runtime overrides of the budget."""

import functools
from contextlib import nullcontext

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.registry import register_router
from moh_jax.layers.moh import MoHAttention
from moh_jax.layers.router import HeadChoice, HeadRouter, Router, count_examples
from tests.layers import small


class HeadRouterTest(parameterized.TestCase):
  @parameterized.parameters(
    ([3, 0], None, 1, np.s_[:1, :3]), (None, [1.0, 0.0], 1, np.s_[:1]),
    (None, [1.0, 0.0], 2, np.s_[:2]),  # two sequences an example
  )  # fmt: skip
  def test_what_does_not_count_leaves_gates_and_narrows_the_statistics(
    self, lengths, weights, each, counted
  ):
    module, x = HeadRouter(small.BUDGET), jnp.tile(small.tokens(), (each, 1, 1))
    params, mask, of_batch = small.params(module, x), None, nullcontext()
    if lengths:
      mask = jnp.arange(small.N)[None] < jnp.array(lengths)[:, None]
    else:
      of_batch = count_examples(jnp.array(weights))
    with of_batch:
      gates, aux = module.apply(params, x, mask)
    chex.assert_trees_all_equal(gates, module.apply(params, x)[0])
    _, expected = module.apply(params, x[counted])
    chex.assert_trees_all_close(aux, expected, rtol=1e-6)

  def test_examples_do_not_count_however_arguments_are_given(self):
    module, x = HeadRouter(small.BUDGET), small.tokens()
    params, mask = small.params(module, x), jnp.ones(x.shape[:2], bool)
    with count_examples(jnp.array([1.0, 0.0])):
      for args, named in ((x, mask), {}), ((), {"x": x}):
        _, aux = module.apply(params, *args, **named)
        self.assertEqual(float(aux.tokens), small.N)
      with self.assertRaisesRegex(ValueError, "has 1 sequences for 2 examples"):
        module.apply(params, x[:1])


def _norms() -> jax.Array:
  norms = np.random.default_rng(3).uniform(size=(small.B, small.N, 6))
  return jnp.asarray(norms, jnp.float32)


class QueryNormRouterTest(parameterized.TestCase):
  def test_estimator_is_the_configs(self):
    def gradient(straight_through):
      config = RouterConfig("query_norm", straight_through=straight_through)

      def total(norms):
        gates, _ = HeadRouter(small.BUDGET, config).apply(
          {}, small.tokens(), norms=norms
        )
        return jnp.sum(jnp.where(gates == 0, 1.0, 0.0) * gates)

      return float(jnp.abs(jax.jit(jax.grad(total))(_norms())).max())

    self.assertEqual(gradient("selected"), 0.0)
    self.assertGreater(gradient("all"), 0.1)


class HeadChoiceTest(parameterized.TestCase):
  @parameterized.parameters("two_stage", "query_norm")
  def test_gates_follow_the_order_and_the_routing_stays_in_it(self, kind):
    module, x = HeadRouter(small.BUDGET, RouterConfig(kind)), small.tokens()
    args = {
      "norms": _norms(),
      "choice": HeadChoice(order=jnp.array(small.ORDER)),
    }
    two_stage = kind == "two_stage"
    variables = small.params(module, x) if two_stage else {}
    apply = functools.partial(module.apply, mutable=["intermediates"])
    (gates, aux), recorded = jax.jit(apply)(variables, x, **args)
    (decided,) = recorded["intermediates"]["routing"]
    np.testing.assert_allclose(aux.load, (gates > 0).mean((0, 1)), rtol=1e-6)
    scores = (decided.shared_scores, decided.probs)
    for head, mean in zip(small.ORDER, np.concatenate(scores, -1).mean((0, 1))):
      self.assertAlmostEqual(aux.mean_score[head], mean, places=6)
    for place, head in enumerate(small.ORDER):
      np.testing.assert_array_equal(gates[..., head], decided.gates[..., place])
    # The first of the order are shared.
    self.assertTrue(bool((gates[..., list(small.ORDER[:2])] > 0).all()))

  @parameterized.parameters("two_stage", "none")
  def test_a_scale_multiplies_the_gates(self, kind):
    module, x = HeadRouter(small.BUDGET, RouterConfig(kind)), small.tokens()
    variables, scale = module.init(jax.random.key(0), x), jnp.arange(6.0)
    gates, _ = module.apply(variables, x)
    scaled, _ = module.apply(variables, x, choice=HeadChoice(scale=scale))
    gates = jnp.ones_like(scaled) if gates is None else gates
    wanted = np.asarray(gates) * np.asarray(scale)
    np.testing.assert_allclose(scaled, wanted, rtol=1e-6)


class GateRouterTest(absltest.TestCase):
  def test_every_head_is_on_and_scores_are_shares(self):
    budget = HeadBudget(num_heads=6, shared=6, top_k=0, head_dim=3)
    module, x = HeadRouter(budget, RouterConfig("gate")), small.tokens()
    variables = small.params(module, x)
    (gates, aux), recorded = module.apply(
      variables, x, mutable=["intermediates"]
    )
    logits = x @ variables["params"]["gate"]
    np.testing.assert_allclose(gates, jax.nn.sigmoid(logits), rtol=1e-5)
    (decided,) = recorded["intermediates"]["routing"]
    shares = gates / gates.sum(-1, keepdims=True)
    np.testing.assert_allclose(decided.shared_scores, shares, rtol=1e-6)
    np.testing.assert_array_equal(aux.load, np.ones(6))


class Threshold(Router):
  """Every head above half of the mean score, so some tokens select more."""

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    probs = nn.softmax(self.logits(x, routed=self.budget.routed)["routed"])
    selected = probs > 0.5 / self.budget.routed
    if top_k is not None:
      selected = self.select(probs, top_k)
    return self.routing(jnp.where(selected, 1.0, 0.0), probs, selected)


class Short(Router):
  """Wrong: forgets the shared heads."""

  def __call__(self, x, *, norms=None, top_k=None):
    return self.routing(*[jnp.zeros((*x.shape[:2], 2))] * 3)


class Norms(Router):
  """Reads the norms of the queries."""

  def __call__(self, x, *, norms=None, top_k=None):
    norms = norms[..., self.budget.shared :]
    probs = norms / norms.sum(-1, keepdims=True)
    selected = self.select(norms, top_k)
    return self.routing(jnp.where(selected, probs, 0.0), probs, selected)


register_router("threshold", Threshold, varies=True)
register_router("undeclared", Threshold)
register_router("short", Short)
register_router("norms", Norms, reads_norms=True)


class RegisteredTest(parameterized.TestCase):
  @pytest.mark.integration
  def test_tokens_may_select_more_heads_than_the_budget_says(self):
    x, found = jax.random.normal(jax.random.key(0), (1, 1024, small.C)), []
    for kind, form in (
      ("threshold", "dense"), ("threshold", "packed"), ("undeclared", "packed")
    ):  # fmt: skip
      layer = MoHAttention(
        HeadBudget(6, 2, 1, 3), RouterConfig(kind), implementation=form
      )
      found.append(jax.jit(layer.apply)(small.params(layer, x), x))
    (dense, aux), (packed, _), (undeclared, _) = found
    self.assertGreater(float(aux.load[2:].sum()), 2)  # top_k is 1
    np.testing.assert_allclose(packed, dense, atol=1e-5)
    self.assertTrue(np.isnan(undeclared).any())

  def test_queries_are_read_where_the_kind_says_so(self):
    layer = MoHAttention(small.BUDGET, RouterConfig("norms"))
    x = small.tokens()
    variables = small.params(layer, x)
    self.assertNotIn("router", variables["params"])
    _, aux = layer.apply(variables, x)
    np.testing.assert_allclose(aux.load.sum(), small.BUDGET.active, rtol=1e-6)

  @parameterized.parameters(
    ("norms", "kind is 'norms'"),
    ("query_norm", "norms=None must be .*query_norm"),
    ("short", r"'short' returned gates float32\(.* must be floating\("),
  )
  def test_missing_norms_and_other_shapes_are_refused(self, kind, message):
    layer = HeadRouter(small.BUDGET, RouterConfig(kind))
    with self.assertRaisesRegex(ValueError, message):
      layer.init(jax.random.key(0), small.tokens())

  @parameterized.parameters(
    ("two_stage", (4, 2, 5, 8), {}, r"x has shape \(4, 2, 5, 8\), must be"),
    ("query_norm", (2, 5, 8), {"norms": (2, 5, 4)}, r"must be float.*5, 6\)"),
    ("timestep", (2, 5, 8), {"time": (3, 9)}, r"time .* must be .*\(2, 9\)"),
  )
  def test_arrays_of_other_shapes_are_refused(self, kind, x, given, message):
    given = {name: jnp.ones(shape) for name, shape in given.items()}
    layer = HeadRouter(small.BUDGET, RouterConfig(kind))
    with self.assertRaisesRegex(ValueError, message):
      layer.init(jax.random.key(0), jnp.ones(x), **given)

  def test_masks_of_other_shapes_and_dtypes_are_refused(self):
    layer, x = HeadRouter(small.BUDGET), small.tokens()
    whole = jnp.ones(x.shape[:2], bool)
    for mask in (whole[:1], whole[0], whole.astype(jnp.float32)):
      with self.assertRaisesRegex(ValueError, "token_mask .* must be bool"):
        layer.init(jax.random.key(0), x, mask)
