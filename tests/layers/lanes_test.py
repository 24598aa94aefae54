"""Layers with their heads in the order of a TPU, against the plain order."""

from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.llm import RotaryConfig
from moh_jax.layers.heads import layer_layout
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.ops import head_layout
from moh_jax.ops.position import rotate, rotation
from moh_jax.ops.target import Target
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import unbox


def _as_on_a_tpu():
  """Context in which heads are ordered as on a TPU; all else is as here."""
  device = Target("tpu", "TPU v5 lite")
  return mock.patch.object(head_layout, "target", return_value=device)


def _inputs(layer, tokens=9):
  """Random parameters of a layer, tokens, and where they stand."""
  x = jax.random.normal(jax.random.key(0), (4, tokens, 24), layer.dtype)
  params = unbox(layer.init(jax.random.key(1), x))
  keys = iter(jax.random.split(jax.random.key(2), 9))
  params = jax.tree.map(
    lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params
  )
  positions = jnp.arange(tokens)[None]
  by = rotation(positions, RotaryConfig(), layer.budget.head_dim)
  return params, x, Places(rotation=by)


def _grads(layer, params, x, places):
  def loss(params, x):
    out, aux = layer.apply(params, x, places=places)
    return jnp.square(out.astype(jnp.float32)).sum() + aux.balance_loss, out

  run = jax.value_and_grad(loss, (0, 1), has_aux=True)
  # Another function each time: a program is kept by its function.
  (_, out), grads = jax.jit(lambda *x: run(*x))(params, x)
  return [out, *jax.tree.leaves(grads)]


class LayerTest(parameterized.TestCase):
  def _check(self, got, want, tolerance):
    for a, b in zip(got, want, strict=True):
      self.assertEqual(a.dtype, b.dtype)
      a, b = (np.asarray(x, np.float32) for x in (a, b))
      scale = max(1.0, np.abs(b).max())
      np.testing.assert_allclose(a, b, atol=tolerance * scale)

  @parameterized.parameters(
    {"head_dim": 64},  # two heads fill the lanes
    {"head_dim": 64, "num_kv_heads": 2, "use_bias": False},
    {"head_dim": 32, "num_kv_heads": 1},  # queries fill them, keys do not
    {"head_dim": 24},  # padded to 32
    {"head_dim": 48, "num_kv_heads": 2},  # to 64
    {"head_dim": 96},  # to 128
    {"head_dim": 96, "use_bias": False, "qk_norm": 1e-6},
    {"head_dim": 96, "router": RouterConfig("query_norm")},
    {"head_dim": 72},  # would be padded too far
    {"head_dim": 64, "dtype": jnp.bfloat16},
    {"head_dim": 64, "router": RouterConfig("none")},
    {"head_dim": 64, "output_major": True},
  )
  def test_equals_the_plain_order(self, head_dim, **settings):
    budget = HeadBudget(4, shared=1, top_k=1, head_dim=head_dim)
    layer = MoHAttention(budget, causal=True, **settings)
    inputs = _inputs(layer)
    want = _grads(layer, *inputs)
    with _as_on_a_tpu():
      self.assertEqual(layer_layout(64, 4).count(4), 2)
      got = _grads(layer, *inputs)
    exact = layer.dtype == jnp.float32
    self._check(got, want, 1e-5 if exact else 3e-2)

  @parameterized.product(heads=(4, 8), head_dim=(64, 96))  # one a device, two
  def test_equals_it_where_a_mesh_splits_the_heads(self, heads, head_dim):
    layer = MoHAttention(
      HeadBudget(heads, heads // 2, top_k=1, head_dim=head_dim), causal=True
    )
    inputs = _inputs(layer)
    want = _grads(layer, *inputs)
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=4))
    with sharding.use_mesh(mesh), _as_on_a_tpu():
      self.assertEqual(layer_layout(64, heads).count(heads), heads // 4)
      got = _grads(layer, *inputs)
    self._check(got, want, 1e-5)


class RotateTest(parameterized.TestCase):
  @parameterized.product(count=(1, 2, 4), dtype=(jnp.float32, jnp.bfloat16))
  def test_equals_the_plain_order(self, count, dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 16), dtype)
    by = rotation(jnp.arange(5)[None] + 3, RotaryConfig(), 16)
    want = rotate(x, by)
    with _as_on_a_tpu():
      got = rotate(x, by, count)
    self.assertEqual(got.dtype, want.dtype)
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    exact = dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-6 if exact else 2e-2)

  def test_remat_keeps_no_result_of_its_product(self):
    by = rotation(jnp.arange(5)[None], RotaryConfig(), 16)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    with _as_on_a_tpu():
      traced = jax.make_jaxpr(lambda x: rotate(x, by, 2))(
        jnp.ones((2, 5, 4, 16))
      )
    products = [
      eqn
      for eqn in _equations(traced.jaxpr)
      if eqn.primitive.name == "dot_general"
    ]
    self.assertLen(products, 1)
    avals = [x.aval for x in products[0].invars]
    kept = policy(products[0].primitive, *avals, **products[0].params)
    self.assertFalse(kept)


def _equations(jaxpr):
  """Equations of a program, also those of the functions that it calls."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _equations(inner)
