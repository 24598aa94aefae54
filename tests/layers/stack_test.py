"""Scanned stacks, rematerialization, stochastic depth, side values."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers.moh import MoHAttention
from moh_jax.layers.stack import (
  REMAT_POLICIES,
  DropPath,
  collect_aux,
  scan_blocks,
)
from moh_jax.ops.routing import RouterAux

_DEPTH, _B, _C = 3, 2, 4


class _Block(nn.Module):
  """A layer with a per-layer input, a shared one and a side value."""

  @nn.compact
  def __call__(self, x, rate, shift):
    y = nn.Dense(_C, name="fc")(x)
    x = x + rate * jnp.tanh(y + shift[None])
    return x, {"loss": jnp.mean(x**2)}


class _DropBlock(nn.Module):
  """Adds a branch of ones that may drop."""

  @nn.compact
  def __call__(self, x, rate):
    branch = DropPath(deterministic=False)(jnp.ones_like(x), rate)
    return x + branch, branch


class _Attention(nn.Module):
  """A layer of attention whose heads are skipped."""

  implementation: str

  @nn.compact
  def __call__(self, x):
    budget = HeadBudget(num_heads=4, head_dim=8, shared=1, top_k=1)
    attention = MoHAttention(budget, implementation=self.implementation)
    out, aux = attention(x)
    return x + out, aux.balance_loss


def _inputs():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(_B, _C)), jnp.float32)
  return x, jnp.array([0.5, 1.0, 2.0]), jnp.ones(_C)


@functools.cache
def _stack(remat: str) -> nn.Module:
  return scan_blocks(_Block, _DEPTH, in_axes=(0, nn.broadcast), remat=remat)()


@functools.cache
def _variables():
  variables = _stack("none").init(jax.random.key(0), *_inputs())
  return {"params": nn.unbox(variables["params"])}


class ScanBlocksTest(parameterized.TestCase):
  @parameterized.parameters(*REMAT_POLICIES)
  def test_remat_gives_equal_values_and_gradients(self, remat):
    def run(remat):
      def loss(variables):
        carry, aux = _stack(remat).apply(variables, *_inputs())
        return jnp.sum(carry**2) + aux["loss"].sum(), aux

      return jax.jit(jax.value_and_grad(loss, has_aux=True))(_variables())

    plain = run("none")
    chex.assert_trees_all_close(run(remat), plain, rtol=1e-6, atol=1e-6)
    self.assertGreater(
      float(jnp.abs(plain[1]["params"]["fc"]["kernel"]).max()), 1e-2
    )

  @parameterized.product(
    implementation=("packed", "kernel"),
    remat=("full", "attention", "dots"),
  )
  @pytest.mark.integration
  def test_only_full_remat_attends_once_more(self, implementation, remat):
    stack = scan_blocks(_Attention, 2, in_axes=(), remat=remat)(implementation)
    x = jnp.zeros((1, 8, 32))
    params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), x))

    def loss(params):
      return stack.apply(params, x)[0].sum()

    program = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    # Of the attention itself; the table of heads is made again.
    loops = re.findall(r"/rematted_computation/\S*/while\b(?!/)", program)
    self.assertEqual(loops != [], remat == "full", loops)

  def test_layers_and_samples_drop_independently(self):
    stack = scan_blocks(_DropBlock, 8, in_axes=(0,))()
    rates = jnp.full((8,), 0.5)
    _, branches = stack.apply(
      {}, jnp.zeros((16, 1)), rates, rngs={"dropout": jax.random.key(0)}
    )
    patterns = np.asarray(branches[..., 0])
    self.assertGreater(len(np.unique(patterns, axis=0)), 1)
    self.assertGreater(len(np.unique(patterns, axis=1)), 1)


class DropPathTest(parameterized.TestCase):
  @parameterized.product(
    rate=(0.1, 0.5, 0.8), dtype=(jnp.float32, jnp.bfloat16)
  )
  def test_drops_whole_samples_and_rescales_the_rest(self, rate, dtype):
    count = 20_000
    x, rngs = jnp.ones((count, 2, 3), dtype), {"dropout": jax.random.key(0)}
    drop = DropPath(deterministic=False)
    out = drop.apply({}, x, jnp.float32(rate), rngs=rngs)
    chex.assert_type(out, dtype)
    out = np.asarray(out, np.float32)
    first = np.broadcast_to(out[:, :1, :1], out.shape)
    np.testing.assert_array_equal(out, first)
    np.testing.assert_allclose(np.unique(out), [0, 1 / (1 - rate)], rtol=1e-2)
    deviation = (rate * (1 - rate) / count) ** 0.5
    np.testing.assert_allclose((out == 0).mean(), rate, atol=5 * deviation)


def _side(losses, load, *, routed=True) -> RouterAux:
  """Side values of a scanned stack with the given losses and one load."""
  load = jnp.tile(jnp.asarray(load, jnp.float32), (len(losses), 1))
  scores = jnp.float32(losses)[:, None] / load.sum(-1, keepdims=True)
  scores = jnp.broadcast_to(scores, load.shape)
  return RouterAux(jnp.ones(len(losses)), load, scores, scores, routed=routed)


class CollectAuxTest(parameterized.TestCase):
  @parameterized.parameters("stacks by name", "layers in order")
  def test_mean_over_routed_layers_and_share_over_all_heads(self, given):
    dense = _side([0.0, 0.0], [1, 1], routed=False)
    routed = _side([1.0, 2.0, 6.0], [1, 0.5, 0.5, 0])
    layers = {"dense": dense, "routed": routed}
    if given == "layers in order":
      one = lambda layer: jax.tree.map(lambda x: x[layer], routed)  # noqa: E731
      layers = [dense, *map(one, range(3))]
    aux = collect_aux(layers)
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_type([aux.balance_loss, aux.activated_share], jnp.float32)
    np.testing.assert_allclose(aux.balance_loss, 3.0)
    np.testing.assert_allclose(aux.activated_share, (4 + 6) / (4 + 12))
    self.assertIs(aux.layers, layers)
