"""Router, head mixing and the whole Mixture-of-Head attention."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.heads import GATE_FORMS, HeadBudget, RouterConfig
from moh_jax.config.rotary import RotaryConfig
from moh_jax.layers import moh
from moh_jax.ops import routing
from moh_jax.ops.cache import make_cache
from moh_jax.ops.position import rotate, rotation

_B, _N, _C = 2, 5, 8
_BUDGET = HeadBudget(num_heads=6, shared=2, top_k=2, head_dim=3)
# (shared, top_k) of six heads to the router's matrices.
_MATRICES = {
  (2, 2): {"routed": 4, "shared": 2, "group": 2},
  (1, 3): {"routed": 5, "group": 2},
  (0, 2): {"routed": 6},
  (6, 0): {"shared": 6},
  (4, 0): {"shared": 4},
  (1, 0): {},
}


def _tokens(dtype=jnp.float32) -> jax.Array:
  x = np.random.default_rng(0).normal(size=(_B, _N, _C))
  return jnp.asarray(x, dtype)


def _params(module: nn.Module, *args):
  """Random parameters of every shape, biases too."""
  shapes = jax.eval_shape(
    lambda: nn.unbox(module.init(jax.random.key(0), *args))
  )
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes
  )


def _budget(split) -> HeadBudget:
  return HeadBudget(6, *split, head_dim=3)


def _softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


class HeadRouterTest(parameterized.TestCase):
  @parameterized.product(
    split=tuple(_MATRICES), dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_shapes_are_float32_whatever_the_tokens(self, split, dtype):
    module, x = moh.HeadRouter(_budget(split)), _tokens(dtype)
    params = _params(module, x)
    chex.assert_trees_all_equal(
      {n: p.shape for n, p in params.get("params", {}).items()},
      {name: (_C, size) for name, size in _MATRICES[split].items()},
    )
    gates, aux = module.apply(params, x)
    chex.assert_shape(gates, (_B, _N, 6))
    chex.assert_shape([aux.load, aux.mean_score], (6,))
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_type(jax.tree.leaves((params, gates, aux)), jnp.float32)

  @parameterized.parameters(
    (True, "released"), (True, "paper"), (False, "paper")
  )
  def test_gates_are_those_of_the_products(self, two_stage, form):
    config = RouterConfig(gate_form=form, two_stage=two_stage)
    module, x = moh.HeadRouter(_BUDGET, config), _tokens()
    params = _params(module, x)
    self.assertEqual("group" in params["params"], two_stage)
    logits = {
      f"{name}_logits": jnp.matmul(x, kernel, precision="highest")
      for name, kernel in params["params"].items()
    }
    expected = routing.two_stage_gates(
      budget=_BUDGET,
      batch_shape=(_B, _N),
      form=form,
      **{"group_logits": None} | logits,
    )
    gates, aux = module.apply(params, x)
    np.testing.assert_allclose(gates, expected.gates, atol=1e-6)
    np.testing.assert_allclose(
      aux.balance_loss,
      routing.balance_loss(expected.probs, expected.selected, form=form),
      rtol=1e-6,
    )

  def test_kind_none_has_no_gates_and_no_parameters(self):
    module = moh.HeadRouter(_BUDGET, RouterConfig(kind="none"))
    (gates, aux), variables = module.init_with_output(
      jax.random.key(0), _tokens()
    )
    self.assertIsNone(gates)
    self.assertEmpty(variables)
    chex.assert_trees_all_equal(aux, routing.all_heads_aux(6))

  def test_bfloat16_tokens_route_as_their_float32_copy(self):
    module, x = moh.HeadRouter(_BUDGET), _tokens(jnp.bfloat16)
    params = _params(module, x)
    chex.assert_trees_all_equal(
      module.apply(params, x), module.apply(params, x.astype(jnp.float32))
    )

  def test_records_its_routing(self):
    module, x = moh.HeadRouter(_BUDGET), _tokens()
    (gates, _), recorded = module.apply(
      _params(module, x), x, mutable=["intermediates"]
    )
    (decided,) = recorded["intermediates"]["routing"]
    chex.assert_trees_all_equal(decided.gates, gates)
    np.testing.assert_array_equal(np.asarray(decided.selected).sum(-1), 2)

  def test_token_mask_leaves_gates_and_narrows_the_statistics(self):
    module, x = moh.HeadRouter(_BUDGET), _tokens()
    params = _params(module, x)
    mask = jnp.arange(_N) < jnp.array([[3], [0]])
    gates, aux = module.apply(params, x, mask)
    expected_gates, _ = module.apply(params, x)
    _, expected_aux = module.apply(params, x[:1, :3])
    chex.assert_trees_all_equal(gates, expected_gates)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-6)

  def test_matrices_start_small_and_unalike(self):
    variables = moh.HeadRouter(_BUDGET).init(jax.random.key(0), _tokens())
    for kernel in jax.tree.leaves(nn.unbox(variables["params"])):
      self.assertBetween(float(jnp.std(kernel)), 0.005, 0.05)

  @parameterized.parameters("plain", "jit", "remat")
  def test_single_routed_head_learns_from_the_balance_loss_only(self, how):
    # The released form renormalizes the one selected score to one.
    module, x = moh.HeadRouter(HeadBudget(6, 2, 1, 3)), _tokens()
    variables = _params(module, x)
    wrap = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}[how]

    def gradient(objective):
      call = wrap(lambda v: objective(*module.apply(v, x)))
      return jax.grad(call)(variables)["params"]

    task = gradient(lambda gates, aux: jnp.sum(jnp.sin(3 * gates)))
    balance = gradient(lambda gates, aux: aux.balance_loss)
    np.testing.assert_allclose(task["routed"], 0.0, atol=2e-6)
    self.assertGreater(float(jnp.abs(task["group"]).max()), 1e-2)
    self.assertGreater(float(jnp.abs(balance["routed"]).max()), 1e-3)
    np.testing.assert_array_equal(balance["group"], 0.0)

  def test_jit_equals_eager(self):
    module, x = moh.HeadRouter(_BUDGET), _tokens()
    params = _params(module, x)
    chex.assert_trees_all_close(
      jax.jit(module.apply)(params, x), module.apply(params, x), atol=1e-6
    )

  def test_rejects_tokens_without_a_batch(self):
    with self.assertRaises(AssertionError):
      moh.HeadRouter(_BUDGET).init(jax.random.key(0), jnp.zeros((_N, _C)))


_QUERY_NORM = RouterConfig("query_norm")
_ORDER = (4, 0, 5, 2, 1, 3)


def _norms() -> jax.Array:
  norms = np.random.default_rng(3).uniform(size=(_B, _N, 6))
  return jnp.asarray(norms, jnp.float32)


class QueryNormRouterTest(parameterized.TestCase):
  def test_has_no_parameters_and_the_gates_of_the_norms(self):
    module = moh.HeadRouter(_BUDGET, _QUERY_NORM)
    (gates, aux), variables = module.init_with_output(
      jax.random.key(0), _tokens(), norms=_norms(), mutable=["params"]
    )
    self.assertEmpty(variables)
    expected = routing.query_norm_gates(_norms(), _BUDGET)
    chex.assert_trees_all_equal(gates, expected.gates)
    chex.assert_trees_all_equal(aux, routing.router_aux(expected, _BUDGET))

  def test_form_changes_the_balance_loss_only(self):
    ours, theirs = (
      moh.HeadRouter(_BUDGET, RouterConfig("query_norm", form)).apply(
        {}, _tokens(), norms=_norms()
      )
      for form in GATE_FORMS
    )
    chex.assert_trees_all_equal(ours[0], theirs[0])
    released, paper = ours[1].balance_loss, theirs[1].balance_loss
    np.testing.assert_allclose(released, 4 * paper, rtol=1e-6)

  def test_estimator_is_the_configs(self):
    def gradient(straight_through):
      config = RouterConfig("query_norm", straight_through=straight_through)

      def total(norms):
        gates, _ = moh.HeadRouter(_BUDGET, config).apply(
          {}, _tokens(), norms=norms
        )
        return jnp.sum(jnp.where(gates == 0, 1.0, 0.0) * gates)

      return float(jnp.abs(jax.jit(jax.grad(total))(_norms())).max())

    self.assertEqual(gradient("selected"), 0.0)
    self.assertGreater(gradient("all"), 0.1)


class HeadChoiceTest(parameterized.TestCase):
  """Departures from the budget, the same for both routers."""

  def _route(self, kind, budget=_BUDGET, choice=None):
    module = moh.HeadRouter(budget, RouterConfig(kind))
    args = {"norms": _norms(), "choice": choice}
    variables = {}
    if kind == "two_stage":
      variables = _params(moh.HeadRouter(_BUDGET), _tokens())
    apply = functools.partial(module.apply, mutable=["intermediates"])
    (gates, aux), recorded = jax.jit(apply)(variables, _tokens(), **args)
    return gates, aux, recorded["intermediates"]["routing"][0]

  @parameterized.product(kind=("two_stage", "query_norm"), top_k=(1, 4))
  def test_top_k_replaces_the_budgets(self, kind, top_k):
    choice = moh.HeadChoice(top_k=jnp.int32(top_k))
    expected = self._route(kind, HeadBudget(6, 2, top_k, 3))
    ours = self._route(kind, choice=choice)
    chex.assert_trees_all_close(ours, expected, rtol=1e-6)
    share = float(ours[1].activated_share)
    self.assertAlmostEqual(share, (2 + top_k) / 6, places=6)

  @parameterized.parameters("two_stage", "query_norm")
  def test_own_order_changes_nothing(self, kind):
    choice = moh.HeadChoice(order=jnp.arange(6))
    chex.assert_trees_all_equal(
      self._route(kind, choice=choice), self._route(kind)
    )

  @parameterized.parameters("two_stage", "query_norm")
  def test_gates_follow_the_order_and_the_routing_stays_in_it(self, kind):
    choice = moh.HeadChoice(order=jnp.array(_ORDER))
    gates, _, decided = self._route(kind, choice=choice)
    for place, head in enumerate(_ORDER):
      np.testing.assert_array_equal(gates[..., head], decided.gates[..., place])
    # The first of the order are shared.
    self.assertTrue(bool((gates[..., list(_ORDER[:2])] > 0).all()))

  def test_order_of_norms_is_that_of_the_heads(self):
    choice = moh.HeadChoice(order=jnp.array(_ORDER))
    gates, _, _ = self._route("query_norm", choice=choice)
    ordered = _norms()[..., jnp.array(_ORDER)]
    expected = routing.query_norm_gates(ordered, _BUDGET).gates
    np.testing.assert_array_equal(gates[..., jnp.array(_ORDER)], expected)


class HeadProjectionTest(parameterized.TestCase):
  @parameterized.product(
    parts=(1, 3), dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_projects_each_part_and_head(self, parts, dtype, use_bias):
    module = moh.HeadProjection(parts, 2, 4, use_bias=use_bias, dtype=dtype)
    x = _tokens()
    variables = _params(module, x)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    kernel = np.asarray(variables["params"]["kernel"])
    bias = variables["params"].get("bias", np.zeros((parts, 2, 4)))
    vectors = module.apply(variables, x)
    self.assertLen(vectors, parts)
    for part, vector in enumerate(vectors):
      chex.assert_shape(vector, (_B, _N, 2, 4))
      chex.assert_type(vector, dtype)
      for head in range(2):
        expected = np.asarray(x) @ kernel[:, part, head] + bias[part, head]
        np.testing.assert_allclose(
          np.asarray(vector[:, :, head], np.float32),
          expected,
          atol=1e-5 if dtype == jnp.float32 else 0.1,
        )

  def test_stores_parameters_in_param_dtype(self):
    module = moh.HeadProjection(1, 2, 4, param_dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(_params(module, _tokens()))
    chex.assert_type(leaves, jnp.bfloat16)


class HeadMixTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(2)
    self.heads = jnp.asarray(rng.normal(size=(_B, _N, 6, 3)), jnp.float32)
    self.gates = jnp.asarray(rng.uniform(size=(_B, _N, 6)), jnp.float32)

  @parameterized.product(
    dtype=(jnp.float32, jnp.bfloat16), use_bias=(True, False)
  )
  def test_equals_the_gated_sum_over_heads(self, dtype, use_bias):
    module = moh.HeadMix(_C, use_bias=use_bias, dtype=dtype)
    variables = _params(module, self.heads, self.gates)
    kernel = np.asarray(variables["params"]["kernel"])  # [H, D, C]
    expected = sum(
      np.asarray(self.gates[:, :, h, None] * self.heads[:, :, h]) @ kernel[h]
      for h in range(6)
    ) + variables["params"].get("bias", np.zeros(_C))
    out = module.apply(variables, self.heads, self.gates)
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    np.testing.assert_allclose(
      np.asarray(out, np.float32),
      expected,
      atol=1e-5 if dtype == jnp.float32 else 0.1,
    )

  def test_no_gates_equal_gates_of_one(self):
    module = moh.HeadMix(_C)
    variables = _params(module, self.heads)
    chex.assert_trees_all_equal(
      module.apply(variables, self.heads),
      module.apply(variables, self.heads, jnp.ones_like(self.gates)),
    )

  def test_head_with_gate_zero_does_not_matter(self):
    module, gates = moh.HeadMix(_C), self.gates.at[:, :, 4].set(0.0)
    variables = _params(module, self.heads, gates)
    chex.assert_trees_all_equal(
      module.apply(variables, self.heads, gates),
      module.apply(variables, self.heads.at[:, :, 4].add(7.0), gates),
    )

  def test_rejects_gates_of_another_head_count(self):
    with self.assertRaises(AssertionError):
      _params(moh.HeadMix(_C), self.heads, self.gates[..., :5])


def _attention_reference(params, x, budget, kv_heads, mask, causal):
  """Head by head, float64: project, attend, gate, mix."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  x = np.asarray(x, np.float64)
  if "qkv" in params:
    names, parts = ("qkv", "qkv", "qkv"), (0, 1, 2)
  else:
    names, parts = ("q", "kv", "kv"), (0, 0, 1)
  router = params["router"]
  probs = _softmax(x @ router["routed"])
  rank = np.argsort(np.argsort(-probs, -1), -1)
  routed = np.where(rank < budget.top_k, probs, 0)
  routed *= budget.top_k / routed.sum(-1, keepdims=True)
  shared = budget.shared * _softmax(x @ router["shared"])
  group = 2 * _softmax(x @ router["group"])
  gates = np.concatenate([shared * group[..., :1], routed * group[..., 1:]], -1)

  seen = np.ones((_B, _N, _N), bool) if mask is None else mask[:, None, :]
  seen = seen & (np.tri(_N, dtype=bool) if causal else True)
  out = np.zeros((_B, _N, _C)) + params["out"]["bias"]
  for head in range(budget.num_heads):
    heads = (head, *[head // (budget.num_heads // kv_heads)] * 2)
    q, k, v = (
      x @ params[n]["kernel"][:, p, h] + params[n]["bias"][p, h]
      for n, p, h in zip(names, parts, heads)
    )
    logits = q @ k.swapaxes(1, 2) * budget.head_dim**-0.5
    weights = _softmax(np.where(seen, logits, -1e30))
    gated = gates[:, :, head, None] * (weights @ v)
    out += gated @ params["out"]["kernel"][head]
  return out


class MoHAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, False, False),
    (None, True, True),
    (6, True, False),
    (3, False, True),
    (1, True, True),
  )
  def test_equals_numpy_reference(self, kv_heads, masked, causal):
    module = moh.MoHAttention(_BUDGET, num_kv_heads=kv_heads, causal=causal)
    x = _tokens()
    mask = np.arange(_N) < np.array([[_N], [3]]) if masked else None
    variables = _params(module, x)
    out, _ = module.apply(
      variables, x, None if mask is None else jnp.asarray(mask)
    )
    expected = _attention_reference(
      variables["params"], x, _BUDGET, kv_heads or 6, mask, causal
    )
    np.testing.assert_allclose(out, expected, atol=5e-5)

  @parameterized.product(
    split=tuple(_MATRICES), dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_shapes_and_dtypes(self, split, dtype):
    module, x = moh.MoHAttention(_budget(split), dtype=dtype), _tokens()
    variables, (out, aux) = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x)[::-1], x
    )
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves((variables, aux)), jnp.float32)
    kernel = nn.unbox(variables)["params"]["qkv"]["kernel"]
    chex.assert_shape(kernel, (_C, 3, 6, 3))

  def test_without_router_is_multi_head_attention(self):
    module = moh.MoHAttention(_BUDGET, RouterConfig(kind="none"))
    x = _tokens()
    variables = _params(module, x)
    self.assertCountEqual(variables["params"], ["qkv", "out"])
    _, aux = module.apply(variables, x)
    self.assertEqual(float(aux.activated_share), 1.0)

  def test_bfloat16_is_close_to_float32_with_equal_routing(self):
    x = _tokens(jnp.bfloat16)
    variables = _params(moh.MoHAttention(_BUDGET), x)
    out, aux = moh.MoHAttention(_BUDGET, dtype=jnp.bfloat16).apply(variables, x)
    expected, expected_aux = moh.MoHAttention(_BUDGET).apply(
      variables, x.astype(jnp.float32)
    )
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-6)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(
      np.asarray(out, np.float32), expected, atol=0.03 * scale
    )

  def test_use_bias_false_has_kernels_only(self):
    module = moh.MoHAttention(_BUDGET, num_kv_heads=2, use_bias=False)
    params = _params(module, _tokens())["params"]
    for name in ("q", "kv", "out"):
      self.assertCountEqual(params[name], ["kernel"])

  def test_causal_output_has_no_gradient_of_later_tokens(self):
    module, x = moh.MoHAttention(_BUDGET, causal=True), _tokens()
    variables = _params(module, x)

    def output(x):  # [N]
      return jnp.sin(module.apply(variables, x)[0]).sum((0, 2))

    reach = jnp.abs(jax.jit(jax.jacrev(output))(x)).sum((1, 3))  # [N, N]
    np.testing.assert_array_equal(np.asarray(reach) > 0, np.tri(_N, dtype=bool))

  def test_padding_does_not_matter(self):
    module, x = moh.MoHAttention(_BUDGET), _tokens()
    variables = _params(module, x)
    mask = jnp.arange(_N) < jnp.array([[4], [2]])
    out, aux = module.apply(variables, x, mask)
    moved = jnp.where(mask[..., None], x, x + 3.0)
    moved_out, moved_aux = module.apply(variables, moved, mask)
    chex.assert_trees_all_close(aux, moved_aux, rtol=1e-6)
    np.testing.assert_allclose(out[mask], moved_out[mask], atol=1e-6)

  def test_gradients_reach_every_parameter(self):
    module, x = moh.MoHAttention(_BUDGET), _tokens()
    variables = _params(module, x)

    @jax.jit
    @jax.grad
    def gradient(variables):
      out, aux = module.apply(variables, x)
      return jnp.sum(out**2) + aux.balance_loss

    grads = gradient(variables)
    chex.assert_tree_all_finite(grads)
    for leaf in jax.tree.leaves(grads):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)

  def test_jit_equals_eager(self):
    module, x = moh.MoHAttention(_BUDGET), _tokens()
    variables = _params(module, x)
    chex.assert_trees_all_close(
      jax.jit(module.apply)(variables, x),
      module.apply(variables, x),
      rtol=1e-5,
      atol=1e-5,
    )

  def test_unknown_implementation_raises(self):
    module = moh.MoHAttention(_BUDGET, implementation="flush")
    with self.assertRaisesRegex(ValueError, "implementation='flush'"):
      module.init(jax.random.key(0), _tokens())


@functools.partial(jax.jit, static_argnums=0)
def _attend_jitted(module, variables, x, places, choice):
  return module.apply(variables, x, places=places, choice=choice)[0]


def _attend(module, variables, x=None, places=None, choice=None):
  x = _tokens() if x is None else x
  return _attend_jitted(module, variables, x, places, choice)


class QueryNormAttentionTest(parameterized.TestCase):
  @parameterized.parameters(None, 2)
  def test_all_heads_on_are_multi_head_attention_exactly(self, kv_heads):
    build = functools.partial(moh.MoHAttention, num_kv_heads=kv_heads)
    plain = build(_BUDGET, RouterConfig(kind="none"))
    variables = _params(plain, _tokens())
    routed = build(HeadBudget(6, 2, 4, 3), _QUERY_NORM)
    chex.assert_trees_all_equal_shapes(variables, _params(routed, _tokens()))
    np.testing.assert_array_equal(
      _attend(routed, variables), _attend(plain, variables)
    )

  def test_heads_are_chosen_by_the_norms_of_their_queries(self):
    module, x = moh.MoHAttention(_BUDGET, _QUERY_NORM), _tokens()
    variables = _params(module, x)
    _, recorded = module.apply(variables, x, mutable=["intermediates"])
    (decided,) = recorded["intermediates"]["router"]["routing"]
    kernel, bias = (variables["params"]["qkv"][n] for n in ("kernel", "bias"))
    queries = np.einsum("bnc,chd->bnhd", x, kernel[:, 0]) + bias[0]
    norms = jnp.asarray(np.linalg.norm(queries, axis=-1))
    expected = routing.query_norm_gates(norms, _BUDGET)
    chex.assert_trees_all_close(decided, expected, rtol=1e-4)

  def test_order_of_heads_is_as_if_the_weights_were_moved(self):
    module = moh.MoHAttention(_BUDGET, _QUERY_NORM)
    variables = _params(module, _tokens())
    order = jnp.array(_ORDER)
    ordered = _attend(module, variables, choice=moh.HeadChoice(order=order))
    moved = jax.tree.map(lambda p: p, variables)
    moved["params"]["qkv"] = {
      "kernel": variables["params"]["qkv"]["kernel"][:, :, order],
      "bias": variables["params"]["qkv"]["bias"][:, order],
    }
    moved["params"]["out"] = {
      "kernel": variables["params"]["out"]["kernel"][order],
      "bias": variables["params"]["out"]["bias"],
    }
    expected = _attend(module, moved)
    np.testing.assert_allclose(ordered, expected, atol=2e-5)
    gap = jnp.abs(ordered - _attend(module, variables)).max()
    self.assertGreater(float(gap), 0.1)


class PlacesTest(parameterized.TestCase):
  """Rotations, segments and caches of a whole layer."""

  def setUp(self):
    super().setUp()
    budget = HeadBudget(num_heads=6, shared=2, top_k=2, head_dim=4)
    self.module = moh.MoHAttention(budget, num_kv_heads=2, causal=True)
    self.variables = _params(self.module, _tokens())
    positions = jnp.broadcast_to(jnp.arange(_N), (_B, _N))
    self.rotation = rotation(positions, RotaryConfig(theta=10.0), 4)

  def test_rotation_turns_queries_and_keys_and_not_values(self):
    places = moh.Places(rotation=self.rotation)
    out = _attend(self.module, self.variables, places=places)
    gap = jnp.abs(out - _attend(self.module, self.variables)).max()
    self.assertGreater(float(gap), 1e-2)
    # A token that sees itself alone is its value, which does not turn.
    each = jnp.broadcast_to(jnp.arange(_N), (_B, _N))
    alone = moh.Places(rotation=self.rotation, segments=each)
    np.testing.assert_allclose(
      _attend(self.module, self.variables, places=alone),
      _attend(self.module, self.variables, places=moh.Places(segments=each)),
      atol=1e-5,
    )

  def test_segments_are_attended_alone(self):
    segments = jnp.array([[1, 1, 2, 2, 2]] * _B)
    out = _attend(
      self.module, self.variables, places=moh.Places(segments=segments)
    )
    for part in (slice(0, 2), slice(2, 5)):
      alone = _attend(self.module, self.variables, _tokens()[:, part])
      np.testing.assert_allclose(out[:, part], alone, atol=2e-5)

  def test_keys_written_are_turned_and_read_back(self):
    whole = moh.Places(rotation=self.rotation)
    expected = _attend(self.module, self.variables, places=whole)
    cache = {"keys_values": make_cache(_B, 2, 8, 4, "float32")}
    outs = []
    apply = jax.jit(functools.partial(self.module.apply, mutable=["cache"]))
    for start, stop in ((0, 3), (3, 5)):
      slots = jnp.arange(8) <= jnp.arange(start, stop)[:, None]
      places = moh.Places(
        rotation=jax.tree.map(lambda x: x[:, start:stop], self.rotation),  # noqa: B023
        slot=jnp.int32(start),
        visible=None if start == 0 else jnp.stack([slots] * _B),
      )
      variables = {**self.variables, "cache": cache}
      x = _tokens()[:, start:stop]
      (out, _), written = apply(variables, x, places=places)
      cache = written["cache"]
      outs.append(out)
    np.testing.assert_allclose(
      jnp.concatenate(outs, axis=1), expected, atol=2e-5
    )
    kernel, bias = (
      self.variables["params"]["kv"][name] for name in ("kernel", "bias")
    )
    keys = jnp.einsum("bnc,chd->bnhd", _tokens(), kernel[:, 0]) + bias[0]
    np.testing.assert_allclose(
      cache["keys_values"].k[:, :, :_N].swapaxes(1, 2),
      rotate(keys, self.rotation),
      atol=1e-5,
    )

  @parameterized.parameters(
    (True, None, True, True),
    (False, None, False, False),
    (True, False, True, False),
    (False, True, False, True),
  )
  def test_output_bias_follows_the_others_unless_told(
    self, use_bias, out_bias, projections, output
  ):
    module = moh.MoHAttention(_BUDGET, use_bias=use_bias, out_bias=out_bias)
    params = _params(module, _tokens())["params"]
    self.assertEqual("bias" in params["qkv"], projections)
    self.assertEqual("bias" in params["out"], output)


class KernelInitTest(parameterized.TestCase):
  @parameterized.parameters(None, 2)
  def test_xavier_counts_the_fans_of_the_whole_matrix(self, kv_heads):
    budget = HeadBudget(num_heads=6, shared=3, top_k=1, head_dim=8)
    module = moh.MoHAttention(
      budget, num_kv_heads=kv_heads, kernel_init=moh.xavier_init
    )
    x = jnp.zeros((1, 1, 32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    fans = {
      "out": (48, 32),
      **({"q": (32, 48), "kv": (32, 32)} if kv_heads else {"qkv": (32, 144)}),
    }
    kernels = {name: params[name]["kernel"] for name in fans}
    fans |= {"routed": (32, 3), "shared": (32, 3), "group": (32, 2)}
    kernels |= params["router"]
    self.assertCountEqual(kernels, fans)
    for name, kernel in kernels.items():
      bound = np.sqrt(6 / sum(fans[name]))
      self.assertBetween(float(jnp.abs(kernel).max()), 0.9 * bound, bound, name)
      spread = 2 / np.sqrt(kernel.size)
      np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=spread)

  def test_default_is_the_same_deviation_everywhere(self):
    budget = HeadBudget(num_heads=6, shared=3, top_k=1, head_dim=8)
    module, x = moh.MoHAttention(budget), jnp.zeros((1, 1, 32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    kernels = [params[name]["kernel"] for name in ("qkv", "out")]
    for kernel in (*kernels, *params["router"].values()):
      spread = 3 / np.sqrt(kernel.size)
      np.testing.assert_allclose(kernel.std(), 0.02, rtol=spread)

  def test_biases_start_at_zero(self):
    module = moh.MoHAttention(_BUDGET, kernel_init=moh.xavier_init)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), _tokens()))[
      "params"
    ]
    for name in ("qkv", "out"):
      np.testing.assert_array_equal(params[name]["bias"], 0.0)


def _layers_aux(losses, load) -> routing.RouterAux:
  """Stacked side values of layers with the given losses and one load."""
  load = jnp.tile(jnp.asarray(load, jnp.float32), (len(losses), 1))
  return routing.RouterAux(
    jnp.asarray(losses, jnp.float32), load, load, load.mean(-1)
  )


class CollectAuxTest(absltest.TestCase):
  def test_mean_over_routed_layers_and_share_over_all_heads(self):
    layers = {
      "dense": _layers_aux([0.0, 0.0], [1, 1]),
      "routed": _layers_aux([1.0, 2.0, 6.0], [1, 0.5, 0.5, 0]),
    }
    aux = moh.collect_aux(layers, {"dense": 0, "routed": 2})
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_type([aux.balance_loss, aux.activated_share], jnp.float32)
    np.testing.assert_allclose(aux.balance_loss, 3.0)
    np.testing.assert_allclose(aux.activated_share, (4 + 6) / (4 + 12))
    self.assertIs(aux.layers, layers)

  def test_no_routed_layer_costs_nothing(self):
    layers = {"dense": _layers_aux([0.0, 0.0], [1, 1])}
    aux = moh.collect_aux(layers, {"dense": 0})
    self.assertEqual(float(aux.balance_loss), 0.0)
    self.assertEqual(float(aux.activated_share), 1.0)


if __name__ == "__main__":
  absltest.main()
