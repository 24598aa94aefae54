"""The training objective against hand-computed losses and likelihoods."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.dit import LOSS_WEIGHTS
from moh_jax.models import diffusion
from moh_jax.models.diffusion import (
  make_process,
  predict_x0,
  q_sample,
  reverse_step,
  training_target,
)

_PREDICTIONS = ("epsilon", "x0", "v")

_OPTIONS = ("prediction", "loss_weight", "snr_gamma")
_PROCESS = make_process("linear", 100)
_STEPS = (1, 5, 40, 99)
_T = jnp.array(_STEPS)
_SHAPE = (len(_STEPS), 3, 2, 2)


def _normal(seed: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), _SHAPE)


_X0, _NOISE = _normal(0) / 2, _normal(1)
_X = q_sample(_PROCESS, _X0, _T, _NOISE)
_bound = jax.jit(
  diffusion.variational_bound, static_argnames=("process", "prediction")
)


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def _losses(prediction: str, out: jax.Array, **options) -> dict:
  return diffusion.training_losses(
    _PROCESS, prediction, out, x0=_X0, x=_X, t=_T, noise=_NOISE, **options
  )


def _out(prediction: str, spread: float, error: float = 0.0) -> jax.Array:
  """The exact target with an error, and one variance output everywhere."""
  target = training_target(_PROCESS, prediction, _X0, _T, _NOISE)
  return jnp.concatenate(
    [target + error * _normal(2), jnp.full(_SHAPE, spread)], axis=-1
  )


class SquaredErrorTest(parameterized.TestCase):
  @parameterized.parameters(*_PREDICTIONS)
  def test_is_the_mean_of_each_example(self, prediction):
    target = training_target(_PROCESS, prediction, _X0, _T, _NOISE)
    scale = jnp.arange(1.0, 5.0)[:, None, None, None]
    losses = _losses(prediction, target + scale)
    self.assertCountEqual(losses, ["mse", "weighted_mse"])
    for loss in losses.values():
      np.testing.assert_allclose(loss, [1.0, 4.0, 9.0, 16.0], rtol=1e-5)

  def test_bfloat16_outputs_are_compared_in_float32(self):
    out = _out("epsilon", 0.0, error=1.0).astype(jnp.bfloat16)
    losses = _losses("epsilon", out)
    chex.assert_shape(list(losses.values()), (len(_STEPS),))
    chex.assert_type(list(losses.values()), jnp.float32)
    chex.assert_trees_all_equal(
      losses, _losses("epsilon", out.astype(jnp.float32))
    )

  @parameterized.product(prediction=_PREDICTIONS, gamma=(0.5, 5.0))
  def test_min_snr_weighs_the_error_of_the_clean_example(
    self, prediction, gamma
  ):
    out = training_target(_PROCESS, prediction, _X0, _T, _NOISE) + _normal(2)
    losses = _losses(prediction, out, loss_weight="min_snr", snr_gamma=gamma)
    x0 = predict_x0(_PROCESS, prediction, out, _X, _T)
    error = np.square(np.asarray(x0 - _X0, np.float64)).mean((1, 2, 3))
    level = _PROCESS.alphas_cumprod[list(_STEPS)]
    expected = np.minimum(level / (1 - level), gamma) * error
    np.testing.assert_allclose(losses["weighted_mse"], expected, rtol=2e-3)
    unweighted = _losses(prediction, out)["mse"]
    chex.assert_trees_all_equal(losses["mse"], unweighted)

  def test_unknown_weight_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"loss_weight='snr' must be one of \('uniform', 'min_snr'\)"
    ):
      _losses("epsilon", _X, loss_weight="snr")

  @parameterized.parameters(*LOSS_WEIGHTS)
  def test_unknown_prediction_lists_the_known(self, loss_weight):
    with self.assertRaisesRegex(
      ValueError, r"prediction='score' .*\('epsilon', 'x0', 'v', 'velocity'\)"
    ):
      _losses("score", _X, loss_weight=loss_weight)


class DivergenceTest(parameterized.TestCase):
  """The bound after the first step."""

  @parameterized.parameters(*_PREDICTIONS)
  def test_true_posterior_costs_nothing(self, prediction):
    bound = _losses(prediction, _out(prediction, spread=-1.0))["vb"]
    np.testing.assert_allclose(bound, 0.0, atol=1e-5)

  def test_variance_of_beta_costs_what_two_gaussians_differ_by(self):
    bound = _losses("x0", _out("x0", spread=1.0))["vb"]
    steps = list(_STEPS)
    ratio = _PROCESS.posterior_variance[steps] / _PROCESS.betas[steps]
    nats = 0.5 * (ratio - 1 - np.log(ratio))
    np.testing.assert_allclose(bound, nats / math.log(2), rtol=1e-3, atol=1e-6)

  def test_wrong_mean_costs_its_square_in_deviations(self):
    bound = _losses("x0", _out("x0", spread=-1.0, error=0.1))["vb"]
    steps = list(_STEPS)
    moved = _PROCESS.posterior_mean_x0[steps] ** 2
    moved *= np.square(0.1 * np.asarray(_normal(2))).mean((1, 2, 3))
    nats = moved / (2 * _PROCESS.posterior_variance[steps])
    np.testing.assert_allclose(bound, nats / math.log(2), rtol=1e-3, atol=1e-6)

  @parameterized.parameters(*_PREDICTIONS)
  def test_gradient_reaches_the_variance_only(self, prediction):
    def bound(out):
      return _losses(prediction, out)["vb"].sum()

    grad = jax.grad(bound)(_out(prediction, spread=0.3, error=0.5))
    np.testing.assert_array_equal(grad[..., :2], 0.0)
    # Except the last step, where both ends of the variance all but meet.
    self.assertTrue(np.all(np.abs(grad[:-1, ..., 2:]).max((1, 2, 3)) > 1e-6))

  def test_gradient_of_the_squared_error_reaches_the_prediction_only(self):
    def loss(out):
      return _losses("v", out)["weighted_mse"].sum()

    grad = jax.grad(loss)(_out("v", spread=0.3, error=0.5))
    np.testing.assert_array_equal(grad[..., 2:], 0.0)
    self.assertTrue(np.all(np.abs(grad[..., :2]).max((1, 2, 3)) > 1e-3))


class LikelihoodTest(absltest.TestCase):
  """The bound at the first step: 8-bit pixels, open bins at both ends."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(2, 4, 4, 1))
    pixels[:, 0, 0], pixels[:, 0, 1] = 0, 255
    self.x0 = np.float32(pixels / 127.5 - 1)
    self.out = np.concatenate(
      [self.x0 + rng.normal(size=self.x0.shape) * 0.01, 0 * self.x0], axis=-1
    ).astype(np.float32)
    self.x = jnp.asarray(self.x0)
    self.t = jnp.zeros(2, jnp.int32)

  def _bound(self, out) -> jax.Array:
    return _bound(_PROCESS, "x0", jnp.asarray(out), self.x, self.x, self.t)

  def test_equals_the_exact_likelihood_of_the_bins(self):
    reverse = reverse_step(_PROCESS, "x0", self.out, self.x, self.t)
    mean = np.asarray(reverse.mean, np.float64)
    scale = np.exp(0.5 * np.asarray(reverse.log_variance, np.float64))

    def cdf(edge):
      return 0.5 * (1 + np.vectorize(math.erf)((edge - mean) / scale / 2**0.5))

    below = np.where(self.x0 < -0.999, 0.0, cdf(self.x0 - 1 / 255))
    above = np.where(self.x0 > 0.999, 1.0, cdf(self.x0 + 1 / 255))
    bits = -np.log2(above - below).mean((1, 2, 3))
    # The release's distribution function is an approximation.
    np.testing.assert_allclose(self._bound(self.out), bits, rtol=2e-3)

  def test_probabilities_of_all_bins_sum_to_one(self):
    x0 = jnp.arange(256.0).reshape(256, 1, 1, 1) / 127.5 - 1
    t = jnp.zeros(256, jnp.int32)
    out = jnp.concatenate(
      [jnp.full_like(x0, 0.6), jnp.full_like(x0, 1.0)], axis=-1
    )
    process = make_process("linear", 21)  # a wide Gaussian, past the edges
    bits = _bound(process, "x0", out, x0, x0, t)
    self.assertAlmostEqual(float((2.0**-bits).sum()), 1.0, places=4)

  def test_impossible_pixel_costs_a_bounded_amount(self):
    bound = self._bound(np.concatenate([self.x0 + 1.5, 0 * self.x0], axis=-1))
    floor = -math.log2(1e-12)
    self.assertTrue(np.all(bound <= floor + 1e-3))
    self.assertTrue(np.all(bound > 0.5 * floor))

  def test_gradient_at_the_first_step_is_finite(self):
    grad = jax.grad(lambda out: self._bound(out).sum())(self.out)
    chex.assert_tree_all_finite(grad)

  def test_only_the_first_step_is_a_likelihood(self):
    t = jnp.array([0, 1])
    both = _bound(_PROCESS, "x0", jnp.asarray(self.out), self.x, self.x, t)
    later = _bound(
      _PROCESS, "x0", jnp.asarray(self.out), self.x, self.x, jnp.ones_like(t)
    )
    np.testing.assert_allclose(both[0], self._bound(self.out)[0], rtol=1e-6)
    np.testing.assert_allclose(both[1], later[1], rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
