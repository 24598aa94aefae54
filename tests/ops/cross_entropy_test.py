"""Cross-entropy in chunks against the plain one."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.cross_entropy import summed_cross_entropy, token_cross_entropy
from tests.ops import devices

_B, _N, _C, _V = 2, 10, 5, 17
_CHUNKS = (0, 1, 3, 5, 99)
_summed = jax.jit(summed_cross_entropy, static_argnums=4)
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


def _plain(x, kernel, targets, weights):
  """All logits at once, by JAX's own log-softmax."""
  logits = jnp.einsum(
    "bnc,cv->bnv",
    x,
    kernel.astype(x.dtype),
    preferred_element_type=jnp.float32,
  )
  log_probs = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
  return -jnp.sum(picked * weights)


def _largest_array(chunk, size):
  """Elements of the largest float32 array of the compiled gradient."""

  def loss(x, kernel, targets, weights):
    return summed_cross_entropy(x, kernel, targets, weights, chunk)

  call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  text = call.lower(*_inputs(size=size)).compile().as_text()
  shapes = re.findall(r"f32\[([\d,]+)\]", text)
  return max(math.prod(map(int, shape.split(","))) for shape in shapes)


class SummedCrossEntropyTest(parameterized.TestCase):
  @parameterized.parameters(*_CHUNKS)
  def test_equals_the_plain_one(self, chunk):
    inputs = _inputs()
    total = _summed(*inputs, chunk)
    chex.assert_shape(total, ())
    chex.assert_type(total, jnp.float32)
    np.testing.assert_allclose(total, _plain(*inputs), rtol=1e-6)

  @parameterized.parameters(*_CHUNKS)
  def test_value_and_gradients_equal_the_plain_ones(self, chunk):
    inputs = _inputs()
    # The cotangent is not one.
    ours, theirs = (
      jax.jit(jax.value_and_grad(lambda *a: -3 * loss(*a), argnums=(0, 1)))(  # noqa: B023
        *inputs
      )
      for loss in (
        lambda x, k, t, w: summed_cross_entropy(x, k, t, w, chunk),
        _plain,
      )
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)

  @parameterized.parameters("gpu", "tpu")
  def test_sums_of_other_backends_are_the_same(self, backend):
    inputs = _inputs()

    def run():
      return jax.value_and_grad(summed_cross_entropy, (0, 1))(*inputs, 4)

    ours = run()
    with devices.traced_for(backend):
      theirs = run()
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(0, 4)
  def test_tokens_of_weight_zero_do_not_matter(self, chunk):
    x, kernel, targets, weights = _inputs()
    other = jnp.where(weights[..., None] > 0, x, 100.0)
    wrong = jnp.where(weights > 0, targets, 0)

    def run(x, targets):
      loss = lambda x, kernel: summed_cross_entropy(  # noqa: E731
        x, kernel, targets, weights, chunk
      )
      return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernel)

    value, (dx, dkernel) = run(other, wrong)
    expected, (_, expected_dkernel) = run(x, targets)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(dkernel, expected_dkernel, atol=1e-5)
    np.testing.assert_array_equal(dx[weights == 0], 0.0)
    self.assertGreater(float(jnp.abs(dx[weights > 0]).min()), 0.0)

  def test_jax_enable_x64_keeps_float32(self):
    with jax.enable_x64(True):
      grads = jax.eval_shape(
        lambda *args: jax.value_and_grad(_summed)(*args, 3), *_inputs()
      )
    chex.assert_type(jax.tree.leaves(grads), jnp.float32)

  def test_no_weight_at_all_gives_zero(self):
    x, kernel, targets, weights = _inputs()
    zeros = jnp.zeros_like(weights)
    self.assertEqual(_summed(x, kernel, targets, zeros, 3), 0.0)

  @parameterized.parameters(0, 3)
  def test_bfloat16_multiplies_in_bfloat16_and_sums_in_float32(self, chunk):
    inputs = _inputs(jnp.bfloat16)

    def run(loss):
      return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*inputs)

    ours, (dx, dkernel) = run(
      lambda x, k, t, w: summed_cross_entropy(x, k, t, w, chunk)
    )
    value, (plain_dx, plain_dkernel) = run(_plain)
    chex.assert_type(
      [ours, dx, dkernel], [jnp.float32, jnp.bfloat16, "float32"]
    )
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    for grad, plain in ((dx, plain_dx), (dkernel, plain_dkernel)):
      plain = np.asarray(plain, np.float32)
      np.testing.assert_allclose(
        np.asarray(grad, np.float32), plain, atol=0.02 * np.abs(plain).max()
      )

  def test_large_logits_stay_finite(self):
    x, kernel, targets, weights = _inputs()
    loss = lambda x: summed_cross_entropy(  # noqa: E731
      x, 1e3 * kernel, targets, weights, 4
    )
    value, grad = jax.jit(jax.value_and_grad(loss))(x)
    chex.assert_tree_all_finite((value, grad))
    expected = _plain(x, 1e3 * kernel, targets, weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)

  def test_weights_get_no_gradient(self):
    grad = jax.grad(_summed, argnums=3)(*_inputs(), 4)
    np.testing.assert_array_equal(grad, 0.0)

  def test_compiled_gradient_never_holds_all_logits(self):
    size = (2, 64, 4, 96)
    every_logit = 2 * 64 * 96
    self.assertGreaterEqual(_largest_array(0, size), every_logit)
    # The logits of a chunk are 2 x 8 x 96; nothing is larger than them.
    self.assertLessEqual(_largest_array(8, size), 2 * 8 * 96)


class TokenCrossEntropyTest(parameterized.TestCase):
  @parameterized.product(chunk=_CHUNKS, dtype=(jnp.float32, jnp.bfloat16))
  def test_equals_the_plain_one(self, chunk, dtype):
    x, kernel, targets, _ = _inputs(dtype)
    nats, correct = _by_token(x, kernel, targets, chunk)
    chex.assert_shape([nats, correct], (_B, _N))
    chex.assert_type([nats, correct], [jnp.float32, jnp.bool_])
    logits = jnp.einsum(
      "bnc,cv->bnv",
      x,
      kernel.astype(dtype),
      preferred_element_type=jnp.float32,
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    expected = -np.take_along_axis(
      log_probs, np.asarray(targets)[..., None], -1
    )
    np.testing.assert_allclose(nats, expected[..., 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(correct, log_probs.argmax(-1) == targets)

  @parameterized.parameters(0, 3)
  def test_most_likely_targets_are_correct(self, chunk):
    x, kernel, _, _ = _inputs()
    best = jnp.einsum("bnc,cv->bnv", x, kernel).argmax(-1)
    _, correct = _by_token(x, kernel, best, chunk)
    self.assertTrue(bool(correct.all()))
    _, correct = _by_token(x, kernel, (best + 1) % _V, chunk)
    self.assertFalse(bool(correct.any()))

  def test_ties_go_to_the_target(self):
    x, _, targets, _ = _inputs()
    nats, correct = _by_token(x, jnp.zeros((_C, _V)), targets, 3)
    self.assertTrue(bool(correct.all()))
    np.testing.assert_allclose(nats, math.log(_V), rtol=1e-6)

  def test_sums_to_the_training_loss(self):
    x, kernel, targets, weights = _inputs()
    nats, _ = _by_token(x, kernel, targets, 3)
    np.testing.assert_allclose(
      jnp.sum(nats * weights),
      _summed(x, kernel, targets, weights, 4),
      rtol=1e-6,
    )


if __name__ == "__main__":
  absltest.main()
