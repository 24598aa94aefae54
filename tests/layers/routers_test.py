"""Routers that are registered, and what all kinds get from the layer."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import registry
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.registry import register_router
from moh_jax.layers.moh import MoHAttention
from moh_jax.layers.router import HeadChoice, HeadRouter, Router
from tests.layers import small


class Threshold(Router):
  """Every head above half of the mean score, so some tokens select more."""

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    probs = nn.softmax(self.logits(x, routed=self.budget.routed)["routed"])
    selected = probs > 0.5 / self.budget.routed
    if top_k is not None:
      selected = self.select(probs, probs, top_k)
    return self.routing(jnp.where(selected, 1.0, 0.0), probs, selected)


class Noisy(Router):
  """Noisy top-k (arXiv:1701.06538), with one deviation for all heads."""

  noise: float = 0.0

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    logits = self.logits(x, routed=self.budget.routed)["routed"]
    scores = logits
    if self.has_rng("dropout"):
      noise = jax.random.normal(self.make_rng("dropout"), logits.shape)
      scores = scores + self.noise * noise
    probs = nn.softmax(logits)
    selected = self.select(scores, probs, top_k)
    return self.routing(jnp.where(selected, probs, 0.0), probs, selected)


class Short(Router):
  """Wrong: forgets the shared heads."""

  def __call__(self, x, *, norms=None, top_k=None):
    return self.routing(*[jnp.zeros((*x.shape[:2], 2))] * 3)


class Norms(Router):
  """Reads the norms of the queries."""

  def __call__(self, x, *, norms=None, top_k=None):
    norms = norms[..., self.budget.shared :]
    probs = norms / norms.sum(-1, keepdims=True)
    selected = self.select(norms, probs, top_k)
    return self.routing(jnp.where(selected, probs, 0.0), probs, selected)


register_router("threshold", Threshold, varies=True)
register_router("undeclared", Threshold)
register_router("noisy", functools.partial(Noisy, noise=5.0))
register_router("short", Short)
register_router("norms", Norms, reads_norms=True)


class RegisteredTest(parameterized.TestCase):
  def test_tokens_may_select_more_heads_than_the_budget_says(self):
    x = jax.random.normal(jax.random.key(0), (1, 1024, small.C))
    layers = {}
    for form in ("dense", "packed"):
      layers[form] = MoHAttention(
        HeadBudget(6, 2, 1, 3), RouterConfig("threshold"), implementation=form
      )
    variables = small.params(layers["dense"], x)
    (dense, aux), packed = (
      jax.jit(layers["dense"].apply)(variables, x),
      jax.jit(layers["packed"].apply)(variables, x)[0],
    )
    self.assertGreater(float(aux.load[2:].sum()), 2)  # top_k is 1
    np.testing.assert_allclose(packed, dense, atol=1e-5)

  def test_more_heads_than_the_budget_says_are_nan_if_undeclared(self):
    x = jax.random.normal(jax.random.key(0), (1, 1024, small.C))
    layer = MoHAttention(
      HeadBudget(6, 2, 1, 3), RouterConfig("undeclared"),
      implementation="packed",
    )  # fmt: skip
    out, _ = layer.apply(small.params(layer, x), x)
    self.assertTrue(np.isnan(out).any())

  def test_jax_enable_x64_keeps_float32_without_routed_heads(self):
    layer = HeadRouter(HeadBudget(6, 6, 0, 3), RouterConfig("noisy"))
    with jax.enable_x64(True):
      made = functools.partial(layer.init_with_output, jax.random.key(0))
      x = jax.ShapeDtypeStruct((1, 4, small.C), np.float32)
      chex.assert_type(jax.tree.leaves(jax.eval_shape(made, x)), "float32")

  def test_noise_is_of_training_alone(self):
    layer, x = HeadRouter(small.BUDGET, RouterConfig("noisy")), small.tokens()
    variables = small.params(layer, x)
    still, _ = layer.apply(variables, x)
    np.testing.assert_array_equal(still, layer.apply(variables, x)[0])
    one, two = (
      layer.apply(variables, x, rngs={"dropout": jax.random.key(seed)})[0]
      for seed in (0, 1)
    )
    self.assertTrue((one != still).any() and (one != two).any())

  def test_queries_are_read_where_the_kind_says_so(self):
    layer = MoHAttention(small.BUDGET, RouterConfig("norms"))
    x = small.tokens()
    variables = small.params(layer, x)
    self.assertNotIn("router", variables["params"])
    _, aux = layer.apply(variables, x)
    np.testing.assert_allclose(aux.load.sum(), small.BUDGET.active, rtol=1e-6)
    with self.assertRaisesRegex(ValueError, "kind is 'norms'"):
      HeadRouter(small.BUDGET, RouterConfig("norms")).apply({}, x)

  def test_order_and_top_k_are_common_to_all_kinds(self):
    layer, x = HeadRouter(small.BUDGET, RouterConfig("noisy")), small.tokens()
    variables = small.params(layer, x)
    order = jnp.array([4, 0, 5, 2, 1, 3])
    choice = HeadChoice(top_k=jnp.int32(1), order=order)
    gates, aux = layer.apply(variables, x, choice=choice)
    np.testing.assert_array_equal(np.asarray(gates)[..., [4, 0]], 1)
    np.testing.assert_array_equal((np.asarray(gates) > 0).sum(-1), 3)
    np.testing.assert_allclose(aux.load.sum(), 3, rtol=1e-6)

  def test_other_shapes_are_refused(self):
    layer = HeadRouter(small.BUDGET, RouterConfig("short"))
    with self.assertRaisesRegex(ValueError, "'short' returned gates of shape"):
      layer.init(jax.random.key(0), small.tokens())


class TableTest(absltest.TestCase):
  def test_a_name_is_taken_once(self):
    for name in ("noisy", "two_stage", "none"):
      with self.assertRaisesRegex(ValueError, f"name='{name}' is taken"):
        register_router(name, Threshold)
    again = register_router("threshold", Threshold, varies=True)
    self.assertIs(registry.get_router("threshold"), again)

  def test_a_record_may_be_added_twice(self):
    for name in ("two_stage", "threshold"):
      kind = registry.get_router(name)
      self.assertIs(registry.ROUTERS.add(kind), kind)


if __name__ == "__main__":
  absltest.main()
