"""Scanned stacks of blocks, rematerialization and stochastic depth."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers.moh import MoHAttention
from moh_jax.layers.stack import REMAT_NAMES, DropPath, scan_blocks

_DEPTH, _B, _C = 3, 2, 4


class _Block(nn.Module):
  """A layer with a per-layer input, a shared one and a side value."""

  @nn.compact
  def __call__(self, x, rate, shift):
    y = nn.Dense(_C, name="fc")(x)
    self.sow("intermediates", "hidden", y)
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
  def test_stack_equals_a_loop_over_the_layers(self):
    variables, (x, rates, shift) = _variables(), _inputs()
    carry, aux = _stack("none").apply(variables, x, rates, shift)
    losses = []
    for layer in range(_DEPTH):
      params = jax.tree.map(lambda p, i=layer: p[i], variables)
      x, layer_aux = _Block().apply(params, x, rates[layer], shift)
      losses.append(layer_aux["loss"])
    np.testing.assert_allclose(carry, x, rtol=1e-6)
    chex.assert_shape(aux["loss"], (_DEPTH,))
    np.testing.assert_allclose(aux["loss"], jnp.stack(losses), rtol=1e-6)

  def test_parameters_get_a_layer_axis_and_differ(self):
    kernel = _variables()["params"]["fc"]["kernel"]
    chex.assert_shape(kernel, (_DEPTH, _C, _C))
    self.assertGreater(float(jnp.abs(kernel[0] - kernel[1]).max()), 1e-3)

  @parameterized.parameters("none", "full")
  def test_intermediates_get_a_layer_axis(self, remat):
    _, recorded = _stack(remat).apply(
      _variables(), *_inputs(), mutable=["intermediates"]
    )
    (hidden,) = recorded["intermediates"]["hidden"]
    chex.assert_shape(hidden, (_DEPTH, _B, _C))

  @parameterized.parameters(*(name for name in REMAT_NAMES if name != "none"))
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
    remat=("full", "attention", "dots", "offload"),
  )
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

  def test_remat_names_its_variables_as_no_remat_does(self):
    for remat in REMAT_NAMES:
      variables = jax.eval_shape(
        _stack(remat).init, jax.random.key(0), *_inputs()
      )
      chex.assert_trees_all_equal_shapes(
        nn.unbox(variables["params"]), _variables()["params"]
      )

  def test_layers_and_samples_drop_independently(self):
    stack = scan_blocks(_DropBlock, 8, in_axes=(0,))()
    rates = jnp.full((8,), 0.5)
    _, branches = stack.apply(
      {}, jnp.zeros((16, 1)), rates, rngs={"dropout": jax.random.key(0)}
    )
    patterns = np.asarray(branches[..., 0])
    self.assertGreater(len(np.unique(patterns, axis=0)), 1)
    self.assertGreater(len(np.unique(patterns, axis=1)), 1)

  def test_unknown_remat_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"remat='some' .*'none', 'full', 'attention', 'dots'"
    ):
      scan_blocks(_Block, _DEPTH, in_axes=(0, nn.broadcast), remat="some")


class DropPathTest(parameterized.TestCase):
  def _drop(self, x, rate, seed=0):
    return DropPath(deterministic=False).apply(
      {}, x, jnp.float32(rate), rngs={"dropout": jax.random.key(seed)}
    )

  def test_deterministic_is_the_identity_without_a_key(self):
    x = jnp.arange(6.0).reshape(2, 3)
    out = DropPath(deterministic=True).apply({}, x, jnp.float32(0.9))
    chex.assert_trees_all_equal(out, x)

  def test_rate_zero_keeps_everything(self):
    x = jnp.arange(6.0).reshape(2, 3)
    chex.assert_trees_all_equal(self._drop(x, 0.0), x)

  def test_drops_whole_samples_and_rescales_the_rest(self):
    out = np.asarray(self._drop(jnp.ones((64, 2, 3)), 0.25))
    first = np.broadcast_to(out[:, :1, :1], out.shape)
    np.testing.assert_array_equal(out, first)
    np.testing.assert_allclose(np.unique(out), [0, 4 / 3], rtol=1e-6)

  @parameterized.parameters(0.1, 0.5, 0.8)
  def test_expectation_is_the_input(self, rate):
    count = 20_000
    out = self._drop(jnp.ones((count, 1)), rate)
    deviation = (rate / (1 - rate) / count) ** 0.5
    np.testing.assert_allclose(out.mean(), 1.0, atol=5 * deviation)
    np.testing.assert_allclose(
      (out == 0).mean(), rate, atol=5 * (rate * (1 - rate) / count) ** 0.5
    )

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_keeps_shape_and_dtype(self, dtype):
    out = self._drop(jnp.ones((4, 2, 3), dtype), 0.5)
    chex.assert_shape(out, (4, 2, 3))
    chex.assert_type(out, dtype)

  def test_needs_a_key_to_drop(self):
    with self.assertRaisesRegex(Exception, "dropout"):
      DropPath(deterministic=False).apply(
        {}, jnp.ones((2, 3)), jnp.float32(0.5)
      )


if __name__ == "__main__":
  absltest.main()
