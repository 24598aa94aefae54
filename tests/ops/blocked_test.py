"""Attention by blocks equals attention of everything, and its gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_jax.ops.blocked import blocked_attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads, all_blocks, head_blocks
from moh_jax.ops.routing import top_k_mask
from moh_jax.ops.visible import Visible

_ARRAYS = (0, 1, 2, 3)


def _inputs(
  *,
  batch=2,
  queries=37,
  keys=None,
  heads=6,
  kv_heads=6,
  dim=8,
  shared=2,
  top_k=2,
  bias=None,
  seed=0,
):
  """Queries, keys, values, bias, weights of the loss, and the active heads."""
  keys = queries if keys is None else keys
  r = iter(jax.random.split(jax.random.key(seed), 6))
  q = jax.random.normal(next(r), (batch, queries, heads, dim))
  k = jax.random.normal(next(r), (batch, keys, kv_heads, dim))
  v = jax.random.normal(next(r), (batch, keys, kv_heads, dim))
  if bias is not None:
    bias = jax.random.normal(next(r), (*bias, queries, keys))
  scores = jax.random.normal(next(r), (batch, queries, heads - shared))
  on = jnp.ones((batch, queries, shared), bool)
  mask = jnp.concatenate([on, top_k_mask(scores, top_k)], axis=-1)
  weights = jax.random.normal(next(r), q.shape)
  return (q, k, v, bias), weights, ActiveHeads(mask, shared + top_k)


def _values(attend, arrays, weights):
  """The weighted sum of an attention's output, the output, the gradients."""

  def loss(*arrays):
    out = attend(*arrays)
    return (out * weights).sum(), out

  where = tuple(i for i in _ARRAYS if arrays[i] is not None)
  (_, out), grads = jax.jit(jax.value_and_grad(loss, where, has_aux=True))(
    *arrays
  )
  return out, grads


def _assert_equal(arrays, weights, visible, blocks, mask, blocks_per_step=1):
  weights = weights * mask[..., None]
  scale = 0.3
  dense = functools.partial(dense_attention, visible=visible, scale=scale)
  ours = functools.partial(
    _blocked,
    visible=visible,
    blocks=blocks,
    scale=scale,
    blocks_per_step=blocks_per_step,
  )
  out, grads = _values(ours, arrays, weights)
  expected, expected_grads = _values(dense, arrays, weights)
  expected = jnp.where(mask[..., None], expected, 0.0)
  _assert_close(out, expected, 2e-6)
  for got, want in zip(grads, expected_grads):
    _assert_close(got, want, 1e-5)


def _blocked(q, k, v, bias, *, visible, blocks, scale, blocks_per_step):
  return blocked_attention(
    q, k, v, bias, visible, blocks, scale, blocks_per_step
  )


def _assert_close(got, want, tolerance):
  chex.assert_tree_all_finite(got)
  # Inputs are of the order of 1; a gradient that cancels to 0 is no scale.
  largest = max(0.1, float(jnp.abs(want).max()))
  np.testing.assert_allclose(got, want, atol=tolerance * largest, rtol=0)


def _visible(causal, masked, batch, tokens):
  if not masked:
    return Visible(causal=causal)
  lengths = jnp.array([tokens, max(tokens - 5, 0)])[:batch, None]
  segments = jnp.arange(tokens)[None] // 11
  return Visible(
    key_mask=jnp.arange(tokens)[None] < lengths,
    segments=jnp.broadcast_to(segments, (batch, tokens)),
    causal=causal,
  )


class BlockedTest(parameterized.TestCase):
  @parameterized.product(
    causal=(False, True),
    masked=(False, True),
    bias=(None, (1, 6), (2, 1)),
    blocks_per_step=(1, 3),
  )
  def test_active_heads_equal_the_dense_form(
    self, causal, masked, bias, blocks_per_step
  ):
    arrays, weights, active = _inputs(queries=37, kv_heads=2, bias=bias)
    visible = _visible(causal, masked, 2, 37)
    blocks = head_blocks(active, 4)
    _assert_equal(
      arrays, weights, visible, blocks, active.mask, blocks_per_step
    )

  @parameterized.product(kv_heads=(1, 3, 6), masked=(False, True))
  def test_prefixes_of_causal_blocks(self, kv_heads, masked):
    arrays, weights, active = _inputs(queries=150, kv_heads=kv_heads)
    visible = _visible(True, masked, 2, 150)
    blocks = head_blocks(active, 16)
    _assert_equal(arrays, weights, visible, blocks, active.mask, 2)

  @parameterized.parameters(1, 5, 16, 64)
  def test_all_heads_equal_the_dense_form(self, rows):
    arrays, weights, active = _inputs(queries=33)
    blocks = all_blocks(2, 33, 6, rows)
    every = jnp.ones_like(active.mask)
    _assert_equal(arrays, weights, Visible(), blocks, every)

  @parameterized.product(queries=(1, 3, 70), keys=(70, 130, 200))
  def test_causal_queries_are_the_last_ones(self, queries, keys):
    arrays, weights, active = _inputs(queries=queries, keys=keys)
    blocks = head_blocks(active, 8)
    visible = Visible(causal=True)
    _assert_equal(arrays, weights, visible, blocks, active.mask, 2)

  def test_first_queries_of_too_few_keys_see_nothing(self):
    arrays, weights, active = _inputs(queries=140, keys=130)
    blocks = head_blocks(active, 8)
    visible = Visible(causal=True)
    _assert_equal(arrays, weights, visible, blocks, active.mask, 2)
    out = blocked_attention(*arrays, visible, blocks, 1.0, 2)
    np.testing.assert_array_equal(out[:, :10], 0.0)

  def test_all_tokens_on_one_head(self):
    arrays, weights, _ = _inputs()
    mask = jnp.zeros((2, 37, 6), bool).at[:, :, 4].set(True)
    blocks = head_blocks(ActiveHeads(mask, 1), 8)
    _assert_equal(arrays, weights, Visible(), blocks, mask, 2)

  def test_no_head_for_anything(self):
    arrays, weights, _ = _inputs()
    mask = jnp.zeros((2, 37, 6), bool)
    blocks = head_blocks(ActiveHeads(mask, 1), 8)
    ours = functools.partial(
      _blocked, visible=Visible(), blocks=blocks, scale=1.0, blocks_per_step=1
    )
    out, grads = _values(ours, arrays, weights)
    chex.assert_trees_all_equal(
      (out, grads), jax.tree.map(jnp.zeros_like, (out, grads))
    )

  @given(
    st.sampled_from((1, 2, 19, 40)),
    st.integers(1, 6),
    st.booleans(),
    st.data(),
  )
  @settings(max_examples=6)
  def test_any_budget_and_length(self, tokens, heads, causal, data):
    shared = data.draw(st.integers(0, heads))
    top_k = data.draw(st.integers(0 if shared else 1, heads - shared))
    rows = data.draw(st.integers(1, 12))
    arrays, weights, active = _inputs(
      batch=1,
      queries=tokens,
      heads=heads,
      kv_heads=heads,
      shared=shared,
      top_k=top_k,
      seed=data.draw(st.integers(0, 99)),
    )
    blocks = head_blocks(active, rows)
    visible = Visible(causal=causal)
    _assert_equal(arrays, weights, visible, blocks, active.mask, 2)

  def test_bfloat16(self):
    arrays, weights, active = _inputs(queries=64)
    exact, _ = _values(
      functools.partial(dense_attention, visible=Visible(), scale=0.3),
      arrays,
      weights,
    )
    rounded = [x.astype(jnp.bfloat16) for x in arrays[:3]]
    blocks = head_blocks(active, 16)
    out = blocked_attention(*rounded, None, Visible(), blocks, 0.3, 2)
    chex.assert_type(out, jnp.bfloat16)
    exact = jnp.where(active.mask[..., None], exact, 0.0)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)


class TransformsTest(parameterized.TestCase):
  """The same under the transformations that models use."""

  def _loss(self, q, k, v, mask, weights):
    blocks = head_blocks(ActiveHeads(mask, 4), 8)
    out = blocked_attention(q, k, v, None, Visible(causal=True), blocks, 0.3, 2)
    return (out * weights).sum()

  def setUp(self):
    super().setUp()
    arrays, weights, active = _inputs(batch=3)
    self.args = (*arrays[:3], active.mask, weights)
    self.grad = jax.jit(jax.value_and_grad(self._loss, (0, 1, 2)))
    self.expected = self.grad(*self.args)

  def test_vmap(self):
    one = [x[:, None] for x in self.args]
    losses, grads = jax.vmap(self.grad)(*one)
    np.testing.assert_allclose(losses.sum(), self.expected[0], rtol=1e-5)
    for got, want in zip(grads, self.expected[1]):
      np.testing.assert_allclose(got[:, 0], want, atol=1e-5)

  def test_remat(self):
    grad = jax.jit(jax.grad(jax.checkpoint(self._loss), (0, 1, 2)))
    chex.assert_trees_all_close(grad(*self.args), self.expected[1], atol=1e-6)

  def test_scan(self):
    @jax.jit
    def total(q, k, v, mask, weights):
      def step(sum_, _):
        return sum_ + self._loss(q, k, v, mask, weights), None

      return jax.lax.scan(step, 0.0, length=2)[0]

    grads = jax.grad(total, (0, 1, 2))(*self.args)
    doubled = jax.tree.map(lambda x: 2 * x, self.expected[1])
    chex.assert_trees_all_close(grads, doubled, atol=2e-5)

  def test_memory_is_linear_in_the_sequence(self):
    def temporary(tokens: int) -> int:
      q = jax.ShapeDtypeStruct((1, tokens, 4, 16), jnp.float32)
      mask = jax.ShapeDtypeStruct((1, tokens, 4), bool)

      def forward(q, k, v, mask):
        blocks = head_blocks(ActiveHeads(mask, 2), 16)
        return blocked_attention(q, k, v, None, Visible(), blocks, 1.0, 4)

      compiled = jax.jit(forward).lower(q, q, q, mask).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    self.assertLess(temporary(2048), 2.2 * temporary(1024))


if __name__ == "__main__":
  absltest.main()
