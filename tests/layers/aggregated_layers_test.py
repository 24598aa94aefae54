"""Attention layers, TransNeXt's two and the plain one: shapes, precision.

Their numbers are held against the public release in tests/parity.
"""

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers import aggregated
from moh_jax.layers.moh import MoHAttention
from moh_jax.ops.position import relative_coordinates
from tests.layers import small

_B, _C, _GRID, _POOL = 2, 12, (4, 6), (2, 3)
_N = math.prod(_GRID)
_BUDGET = HeadBudget(num_heads=4, shared=1, top_k=2, head_dim=3)


def _random(*shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def _module(kind: str, **options) -> tuple[nn.Module, tuple]:
  """An attention layer and its inputs."""
  if kind == "moh":
    return MoHAttention(_BUDGET, **options), (_random(_B, _N, _C), None)
  if kind == "full":
    module = aggregated.FullAttention(_BUDGET, **options)
    return module, (_random(_B, _N, _C), relative_coordinates(_GRID, _GRID))
  module = aggregated.AggregatedAttention(
    _BUDGET, grid=_GRID, pool_grid=_POOL, **options
  )
  return module, (_random(_B, _N, _C), relative_coordinates(_GRID, _POOL))


@functools.cache
def _applied(kind: str, dtype=jnp.float32):
  """Variables, outputs and gradients of a layer, compiled once."""
  module, inputs = _module(kind, dtype=dtype)
  variables = small.params(module, *inputs)

  def loss(variables, x):
    out, aux = module.apply(variables, x, inputs[1])
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, aux)

  call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, outputs), grads = call(variables, inputs[0])
  return variables, outputs, grads


class RefusalsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"window": 2}, "window=2 must be odd"),
    ({"pool_grid": (0, 2)}, r"pool_grid=\(0, 2\) must be in"),
    ({"pool_grid": (64, 2)}, r"pool_grid=\(64, 2\) must be in"),
  )
  def test_what_is_wrong_is_named(self, fields, message):
    module, inputs = _module("pooled")
    with self.assertRaisesRegex(ValueError, message):
      module.clone(**fields).init(jax.random.key(0), *inputs)


@parameterized.parameters("full", "pooled", "moh")
class AttentionLayersTest(parameterized.TestCase):
  def test_shapes_and_float32(self, kind):
    variables, (out, aux), _ = _applied(kind)
    chex.assert_shape(out, (_B, _N, _C))
    chex.assert_shape([aux.load, aux.mean_score], (4,))
    chex.assert_shape(aux.balance_loss, ())
    chex.assert_type(jax.tree.leaves((variables, out, aux)), jnp.float32)
    np.testing.assert_allclose(aux.load.mean(), 0.75)

  def test_bfloat16_is_close_to_float32(self, kind):
    variables, (out, aux), grads = _applied(kind, jnp.bfloat16)
    chex.assert_type(out, jnp.bfloat16)
    chex.assert_type(jax.tree.leaves((variables, aux, grads)), jnp.float32)
    _, (expected, expected_aux), _ = _applied(kind)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-6)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(
      np.asarray(out, np.float32), expected, atol=0.03 * scale
    )

  def test_gradients_are_finite_and_reach_the_tokens(self, kind):
    _, _, (grads, grad_x) = _applied(kind)
    chex.assert_tree_all_finite((grads, grad_x))
    self.assertGreater(float(jnp.abs(grad_x).min()), 0.0)
    for name in ("q", "kv", "sr", "norm") if kind == "pooled" else ("qkv",):
      for leaf in jax.tree.leaves(grads["params"][name]):
        self.assertGreater(float(jnp.abs(leaf).max()), 0.0)
