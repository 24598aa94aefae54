"""Scanned stacks, rematerialization, stochastic depth."""

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
from moh_jax.layers.stack import DropPath, scan_blocks


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


class ScanBlocksTest(parameterized.TestCase):
  @parameterized.product(
    implementation=("packed", "kernel"), remat=("full", "attention", "dots")
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
