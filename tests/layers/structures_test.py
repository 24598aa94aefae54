"""Structures of head choice against a mask by brute force, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from scipy import special

from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.layers.attend import attend_on_mesh
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.layers.router import HeadChoice, HeadRouter
from moh_jax.ops.cache import Slots, make_cache
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.runtime.parameters import unbox
from tests.layers import small

_GROUPS, _SIZE = 4, 3
_HEADS, _DIM, _TOKENS = _GROUPS * _SIZE, 8, 20
_BUDGETS = {"free": (4, 4), "per_group": (4, 4), "whole_group": (3, 3)}
_softmax = functools.partial(special.softmax, axis=-1)
# Shapes of all heads: parts, units of a part, heads of a unit.
_UNITS = {
  "free": (1, _HEADS, 1),
  "per_group": (_GROUPS, _SIZE, 1),
  "whole_group": (1, _GROUPS, _SIZE),
}


def _gates(layer, params, x, q):
  """Gates [B, N, H] and the balance loss, in float64."""
  router, lead = layer.router, x.shape[:2]
  units = np.arange(_HEADS).reshape(_UNITS[router.structure])
  parts, _, size = units.shape
  count, k = (
    n // (parts * size) for n in (layer.budget.shared, layer.budget.top_k)
  )
  shares, routes = (
    x.reshape(-1, size) for x in (units[:, :count], units[:, count:])
  )
  learned = router.kind == "two_stage"
  if learned:
    logits = x @ params["routed"]
  else:
    norms = np.sqrt(np.square(q).sum(-1)[..., routes].sum(-1))
    logits = norms / norms.std(-1, ddof=1, keepdims=True)
  probs = _softmax(logits)
  by_part = logits.reshape(*lead, parts, -1)
  selected = by_part >= np.sort(by_part)[..., -k, None]
  selected = selected.reshape(logits.shape)
  shared, weights = np.ones((*lead, len(shares))), 1.0 * selected
  if learned:
    if "shared" in params:
      shared = _softmax(x @ params["shared"])
    weights = weights * probs
    if router.gate_form == "released":
      weights = weights / weights.sum(-1, keepdims=True) * k * parts * 2
      shared = shared * 2 * len(shares)
    group = x @ params["group"] if router.two_stage else np.zeros(2)
    first, second = np.moveaxis(_softmax(group), -1, 0)
    shared, weights = shared * first[..., None], weights * second[..., None]
  gates = np.zeros((*lead, _HEADS))
  for values, heads in ((shared, shares), (weights, routes)):
    gates[..., heads.reshape(-1)] = values.repeat(size, axis=-1)
  loss = (selected.mean((0, 1)) * probs.mean((0, 1))).sum()
  if router.gate_form == "released":
    loss *= probs.shape[-1]
  return gates, loss


def _layer(structure, router, **options):
  budget = HeadBudget(_HEADS, *_BUDGETS[structure], _DIM)
  router = dataclasses.replace(router, structure=structure)
  return MoHAttention(budget, router, num_kv_heads=_GROUPS, **options)


def _inputs(layer, batch=2):
  x = jax.random.normal(jax.random.key(1), (batch, _TOKENS, 32))
  params = unbox(layer.init(jax.random.key(2), x))
  # Gates far from uniform.
  return x, jax.tree.map(lambda p: p * 3, params)


def _brute_force(layer, params, x, segments=None):
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params["params"])
  x = np.asarray(x, np.float64)

  def project(name):
    made = params[name]
    out = np.einsum("bnc,cphd->pbnhd", x, made["kernel"])
    return out + made["bias"][:, None, None]

  [q], (k, v) = project("q"), project("kv")
  gates, loss = _gates(layer, params.get("router"), x, q)
  k, v = (np.repeat(y, _SIZE, axis=2) for y in (k, v))
  logits = np.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(_DIM)
  sees = np.ones(logits.shape[-2:], bool)[None]
  if layer.causal:
    sees = np.tril(sees[0])[None]
  if segments is not None:
    sees = sees & (segments[:, :, None] == segments[:, None])
  weights = _softmax(np.where(sees[:, None], logits, -np.inf))
  heads = np.einsum("bhnm,bmhd->bnhd", weights, v) * gates[..., None]
  out = np.einsum("bnhd,hdc->bnc", heads, params["out"]["kernel"])
  return out + params["out"]["bias"], gates, loss


class StructuresTest(parameterized.TestCase):
  @parameterized.product(
    structure=tuple(_BUDGETS),
    case=(
      (RouterConfig(), True, "packed"),
      (RouterConfig(gate_form="paper"), False, "dense"),
      (RouterConfig(two_stage=False), False, "packed"),
      (RouterConfig("query_norm"), True, "packed"),
    ),
  )
  @pytest.mark.integration
  def test_equals_a_mask_by_brute_force(self, structure, case):
    router, causal, implementation = case
    layer = _layer(
      structure, router, causal=causal, implementation=implementation
    )
    x, params = _inputs(layer)
    segments = np.repeat([[0] * 7 + [1] * 13], 2, axis=0)
    places = Places(segments=jnp.asarray(segments)) if causal else None
    segments = segments if causal else None
    out, aux = jax.jit(layer.apply)(params, x, places=places)
    expected, gates, loss = _brute_force(layer, params, x, segments)
    np.testing.assert_allclose(out, expected, atol=2e-6 * abs(expected).max())
    np.testing.assert_allclose(aux.balance_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(aux.load, (gates > 0).mean((0, 1)), atol=1e-6)
    active = layer.budget.active
    np.testing.assert_array_equal((gates > 0).sum(-1), active)

  @parameterized.product(
    structure=tuple(_BUDGETS), kind=("two_stage", "query_norm")
  )
  @pytest.mark.integration
  def test_gradients_are_those_of_all_heads(self, structure, kind):
    router = RouterConfig(kind)
    layer = _layer(structure, router, causal=True, implementation="packed")
    x, params = _inputs(layer)
    # A number of heads that programs do not know makes them compute all.
    every = HeadChoice(top_k=jnp.int32(layer.budget.top_k))

    ours, dense = (
      small.gradients(layer.clone(implementation=form), choice=choice)(
        params, x
      )
      for form, choice in (("packed", None), ("dense", every))
    )
    for a, b in zip(ours, dense):
      np.testing.assert_allclose(a, b, atol=1e-5 * float(abs(b).max()))

  @parameterized.product(structure=tuple(_BUDGETS), single=(True, False))
  @pytest.mark.integration
  def test_a_cache_gives_what_whole_texts_give(self, structure, single):
    layer = _layer(structure, RouterConfig("query_norm"), causal=True)
    x, params = _inputs(layer)
    expected, _ = layer.apply(params, x)
    cache = make_cache(2, _GROUPS, _TOKENS + 3, _DIM, "float32")
    split = _TOKENS - (1 if single else 4)
    _, _, cache = layer.apply(
      params, x[:, :split], cache, Slots(jnp.int32(2)), method="decode"
    )
    slots = Slots(jnp.int32(2 + split), jnp.full(2, 2))
    out, *_ = layer.apply(params, x[:, split:], cache, slots, method="decode")
    error = abs(out - expected[:, split:]).max() / abs(expected).max()
    self.assertLess(error, 2e-6)

  def test_other_heads_may_be_shared(self):
    order = (2, 5, 7, 10, 0, 1, 3, 4, 6, 8, 9, 11)
    layer = _layer("per_group", RouterConfig("query_norm"))
    x, params = _inputs(layer)
    choice = HeadChoice(order=jnp.array(order))
    _, aux = jax.jit(layer.apply)(params, x, choice=choice)
    load = np.asarray(aux.load).reshape(_GROUPS, _SIZE)
    np.testing.assert_array_equal(load.reshape(-1)[list(order[:4])], 1)
    np.testing.assert_allclose(load.sum(-1), 2, rtol=1e-6)

  @parameterized.parameters(
    ("free", (5, 4, 3), (5, 4, 3, 0, 1, 2, 6, 7, 8, 9, 10, 11)),
    ("per_group", (5, 4, 3), (0, 5, 6, 9, 1, 2, 4, 3, 7, 8, 10, 11)),
    (
      "whole_group",
      (9, 10, 11, 7, 8, 6),
      (9, 10, 11, 6, 7, 8, 0, 1, 2, 3, 4, 5),
    ),
  )
  def test_the_first_heads_are_shared(self, structure, first, order):
    rest = [head for head in range(_HEADS) if head not in first]
    layer = _layer(structure, RouterConfig())
    units = Units.of(layer.budget, layer.router, _GROUPS)
    found = units.order((*first, *rest))
    self.assertEqual(found, order)
    self.assertEqual(units.order(found), order)

  @parameterized.parameters(
    ("free", (7, 3, 3), 2, "num_heads=7 must be a multiple of 2 key/value"),
    ("per_group", (12, 3, 4), 4, "shared=3 must be a multiple of the 4 key"),
    ("per_group", (12, 4, 6), 4, "top_k=6 must be a multiple of the 4 key"),
    ("per_group", (12, 4, 4), None, "structure='per_group' needs more query"),
    ("whole_group", (12, 3, 4), 4, "top_k=4 must be a multiple of the 3 heads"),
  )
  def test_numbers_that_groups_cannot_have(self, structure, split, kv, said):
    layer = MoHAttention(
      HeadBudget(*split, 8), RouterConfig(structure=structure), kv
    )
    with self.assertRaisesRegex(ValueError, said):
      layer.init(jax.random.key(0), jnp.zeros((1, 4, 8)))

  @parameterized.parameters(
    ("free", "released", True), ("per_group", "paper", True),
    ("whole_group", "released", False), ("whole_group", "paper", True),
  )  # fmt: skip
  def test_any_number_at_run_time_is_rounded_to_units(
    self, structure, form, shared
  ):
    step = {"free": 1, "per_group": 4, "whole_group": 3}[structure]
    budget = HeadBudget(_HEADS, _BUDGETS[structure][0] * shared, 2 * step, _DIM)
    router = RouterConfig(gate_form=form, structure=structure, two_stage=False)
    module = HeadRouter(budget, router, kv_heads=_GROUPS)
    x = jax.random.normal(jax.random.key(1), (2, 3, 32))
    params = unbox(module.init(jax.random.key(2), x))

    @jax.jit
    def apply(k):
      choice = HeadChoice(top_k=k)
      return module.apply(params, x, choice=choice, mutable=["intermediates"])

    for k in (1, 3, 4, 7, 99):
      (_, aux), recorded = apply(jnp.int32(k))
      (decided,) = recorded["intermediates"]["routing"]
      count = np.clip(k // step * step, step, budget.routed)
      np.testing.assert_array_equal(decided.selected.sum(-1), count)
      used = budget.shared + count
      np.testing.assert_allclose(aux.heads_used, used, rtol=1e-6)
      routed = decided.gates[..., budget.shared :]
      np.testing.assert_array_equal(routed > 0, decided.selected)
      if form == "released":  # the gates of a uniform router are 1
        np.testing.assert_allclose(routed.sum(-1), count, rtol=1e-5)


class PickedHeadsTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  @pytest.mark.integration
  def test_tokens_with_fewer_and_more_heads(self, causal):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (3, 5, _HEADS, _DIM))
    k, v = jax.random.normal(keys[1], (2, 3, 5, _GROUPS, _DIM))
    mask = np.zeros((3, 5, _GROUPS, _SIZE), bool)
    mask[..., 1:] = True
    mask[0, :, :, 1] = False
    mask[2, 3, 2, 0] = True  # a third one
    mask = mask.reshape(3, 5, _HEADS)
    active = ActiveHeads(jnp.asarray(mask), 2 * _GROUPS, parts=_GROUPS)
    call = Call(q, k, v, Visible(causal=causal), _DIM**-0.5)
    expected = attend_on_mesh(call, "dense")
    out = attend_on_mesh(dataclasses.replace(call, active=active), "auto")
    expected = np.where(mask[..., None], expected, 0)
    used = np.where(mask[..., None], out, 0)  # others are unspecified
    np.testing.assert_allclose(used[:2], expected[:2], atol=2e-6)
    wrong = np.isnan(np.asarray(out[2])).all((-1, -2))
    np.testing.assert_array_equal(wrong, [False] * 3 + [True, False])
