"""Cross-entropy in chunks against the plain one; rows of an embedding."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.ops.cross_entropy import (
  ALL,
  summed_cross_entropy,
  take,
  token_cross_entropy,
)
from tests.ops import devices

_B, _N, _C, _V = 2, 10, 5, 17
_CHUNKS = (0, 1, 3, 99)
_by_token = jax.jit(token_cross_entropy, static_argnums=3)


def _inputs(dtype=jnp.float32, size=(_B, _N, _C, _V)):
  batch, length, width, vocab = size
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(batch, length, width)), dtype)
  kernel = jnp.asarray(rng.normal(size=(width, vocab)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
  weights = rng.uniform(size=(batch, length)) * (
    rng.uniform(size=(batch, length)) < 0.7
  )
  return x, kernel, targets, jnp.asarray(weights, jnp.float32)


def _log_probs(x, kernel):
  """Of all tokens at once, by JAX's own log-softmax."""
  logits = jnp.einsum(
    "bnc,cv->bnv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
  )
  return jax.nn.log_softmax(logits)


def _plain(x, kernel, targets, weights):
  picked = jnp.take_along_axis(_log_probs(x, kernel), targets[..., None], -1)
  return -jnp.sum(picked[..., 0] * weights)


def _run(inputs, chunk=None, factor=1.0):
  """Value and gradients, of the plain form without a chunk."""

  def loss(*args):
    if chunk is None:
      return factor * _plain(*args)
    return factor * summed_cross_entropy(*args, chunk)

  value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*inputs)
  return value, *grads


class SummedCrossEntropyTest(parameterized.TestCase):
  @parameterized.parameters(*_CHUNKS)
  def test_value_and_gradients_equal_the_plain_ones(self, chunk):
    # Large logits stay finite, and the cotangent is not one.
    x, *others = _inputs()
    for inputs in ((x, *others), (1e3 * x, *others)):
      ours, expected = (_run(inputs, n, factor=-3) for n in (chunk, None))
      chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters("gpu", "tpu")
  def test_sums_of_other_backends_are_the_same(self, backend):
    def run():
      return jax.value_and_grad(summed_cross_entropy, (0, 1))(*_inputs(), 4)

    ours = run()
    with devices.traced_for(backend):
      theirs = run()
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(0, 4)
  def test_tokens_of_weight_zero_do_not_matter(self, chunk):
    x, kernel, targets, weights = _inputs()
    other = jnp.where(weights[..., None] > 0, x, 100.0)
    wrong = jnp.where(weights > 0, targets, 0)
    value, dx, dkernel = _run((other, kernel, wrong, weights), chunk)
    expected, _, expected_dkernel = _run((x, kernel, targets, weights), chunk)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(dkernel, expected_dkernel, atol=1e-5)
    np.testing.assert_array_equal(dx[weights == 0], 0.0)
    self.assertGreater(float(jnp.abs(dx[weights > 0]).min()), 0.0)
    value, *_ = _run((x, kernel, targets, 0 * weights), chunk)
    self.assertEqual(value, 0.0)
    grad = jax.grad(summed_cross_entropy, argnums=3)(*_inputs(), chunk)
    np.testing.assert_array_equal(grad, 0.0)  # weights are known

  def test_gradients_have_the_dtype_of_their_arrays(self):
    x, kernel, *others = _inputs(jnp.bfloat16)
    _, *grads = _run((x, kernel.astype(jnp.bfloat16), *others), 3)
    chex.assert_type(grads, jnp.bfloat16)

  @parameterized.parameters(0, 3)
  def test_bfloat16_multiplies_in_bfloat16_and_sums_in_float32(self, chunk):
    ours, *grads = _run(_inputs(jnp.bfloat16), chunk)
    value, *plain = _run(_inputs(jnp.bfloat16))
    chex.assert_type([ours, *grads], [jnp.float32, jnp.bfloat16, "float32"])
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    for grad, expected in zip(grads, plain):
      grad, expected = (np.asarray(x, np.float32) for x in (grad, expected))
      atol = 0.02 * np.abs(expected).max()
      np.testing.assert_allclose(grad, expected, atol=atol)

  def test_compiled_gradient_never_holds_all_logits(self):
    size = (2, 64, 4, 96)

    def largest(chunk):
      """Elements of the largest float32 array."""
      loss = lambda *args: summed_cross_entropy(*args, chunk)  # noqa: E731
      call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
      text = call.lower(*_inputs(size=size)).compile().as_text()
      shapes = re.findall(r"f32\[([\d,]+)\]", text)
      return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    self.assertGreaterEqual(largest(0), 2 * 64 * 96)
    # The logits of a chunk are 2 x 8 x 96; nothing is larger than them.
    self.assertLessEqual(largest(8), 2 * 8 * 96)


class TokenCrossEntropyTest(parameterized.TestCase):
  @parameterized.product(chunk=_CHUNKS, dtype=(jnp.float32, jnp.bfloat16))
  def test_equals_the_plain_one(self, chunk, dtype):
    x, kernel, targets, _ = _inputs(dtype)
    log_probs = np.asarray(_log_probs(x, kernel))
    best = jnp.asarray(log_probs.argmax(-1), jnp.int32)
    for wanted in (targets, best):
      nats, correct = _by_token(x, kernel, wanted, chunk)
      chex.assert_type([nats, correct], [jnp.float32, jnp.bool_])
      expected = -np.take_along_axis(log_probs, wanted[..., None], -1)
      np.testing.assert_allclose(nats, expected[..., 0], rtol=1e-5, atol=1e-6)
      np.testing.assert_array_equal(correct, best == wanted)

  def test_ties_go_to_the_target(self):
    x, _, targets, _ = _inputs()
    nats, correct = _by_token(x, jnp.zeros((_C, _V)), targets, 3)
    self.assertTrue(bool(correct.all()))
    np.testing.assert_allclose(nats, math.log(_V), rtol=1e-6)


class TakeTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_rows_and_gradients_in_each_dtype(self, dtype):
    table = jax.random.normal(jax.random.key(0), (7, 4)).astype(dtype)
    tokens = jnp.array([[0, 6, 3], [3, 3, 1]])
    weights = jax.random.normal(jax.random.key(1), (2, 3, 4))

    def weighted(table):
      rows = take(ALL, table, tokens, jnp.float32)
      return (weights * rows).sum(), rows

    (_, rows), grad = jax.jit(jax.value_and_grad(weighted, has_aux=True))(table)
    np.testing.assert_array_equal(rows, np.asarray(table, np.float32)[tokens])
    expected = jnp.einsum("bnv,bnc->vc", jax.nn.one_hot(tokens, 7), weights)
    self.assertEqual(grad.dtype, table.dtype)
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(
      grad.astype(jnp.float32), expected, atol=tolerance, rtol=tolerance
    )
