"""Predictions, and the reverse step that follows from them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.models import diffusion as prediction_lib
from moh_jax.models.diffusion import make_process, q_sample, respace

_PREDICTIONS = ("epsilon", "x0", "v")

_PROCESS = make_process("cosine", 50)
_STEPS = (0, 1, 17, 40)
_T = jnp.array(_STEPS)
_SHAPE = (len(_STEPS), 3, 2, 2)


def _normal(seed: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), _SHAPE)


_X0, _NOISE = _normal(0) / 2, _normal(1)
_X = q_sample(_PROCESS, _X0, _T, _NOISE)


def _target(prediction: str) -> jax.Array:
  return prediction_lib.training_target(_PROCESS, prediction, _X0, _T, _NOISE)


def _column(table: np.ndarray) -> np.ndarray:
  """Values of a float64 table at every example's step."""
  return table[np.array(_STEPS)][:, None, None, None]


class PredictionTest(parameterized.TestCase):
  @parameterized.parameters(*_PREDICTIONS)
  def test_exact_target_gives_the_clean_example(self, prediction):
    x0 = prediction_lib.predict_x0(
      _PROCESS, prediction, _target(prediction), _X, _T
    )
    np.testing.assert_allclose(x0, _X0, atol=1e-5)

  def test_clean_example_implies_its_noise(self):
    noise = prediction_lib.implied_noise(_PROCESS, _X0, _X, _T)
    np.testing.assert_allclose(noise, _NOISE, atol=1e-4)

  def test_targets_are_noise_example_and_velocity(self):
    level = _column(_PROCESS.alphas_cumprod)
    velocity = np.sqrt(level) * _NOISE - np.sqrt(1 - level) * _X0
    chex.assert_trees_all_equal(_target("epsilon"), _NOISE)
    chex.assert_trees_all_equal(_target("x0"), _X0)
    np.testing.assert_allclose(_target("v"), velocity, atol=1e-6)

  def test_unknown_prediction_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"prediction='score' .*\('epsilon', 'x0', 'v', 'velocity'\)"
    ):
      prediction_lib.predict_x0(_PROCESS, "score", _X, _X, _T)


class SplitOutputTest(parameterized.TestCase):
  def test_halves_are_prediction_and_variance(self):
    out = jnp.arange(12.0).reshape(1, 2, 1, 6)
    value, spread = prediction_lib.split_output(out, 3)
    chex.assert_trees_all_equal(value, out[..., :3])
    chex.assert_trees_all_equal(spread, out[..., 3:])

  def test_plain_output_has_no_variance(self):
    value, spread = prediction_lib.split_output(_X, 2)
    chex.assert_trees_all_equal(value, _X)
    self.assertIsNone(spread)

  @parameterized.parameters(1, 3, 5)
  def test_other_numbers_of_channels_raise(self, channels):
    with self.assertRaisesRegex(
      ValueError, f"{channels} output channels must be 2, or 4"
    ):
      prediction_lib.split_output(jnp.zeros((1, 1, 1, channels)), 2)


class ReverseStepTest(parameterized.TestCase):
  @parameterized.parameters(*_PREDICTIONS)
  def test_perfect_prediction_gives_the_posterior(self, prediction):
    reverse = prediction_lib.reverse_step(
      _PROCESS, prediction, _target(prediction), _X, _T
    )
    level, before = _PROCESS.alphas_cumprod, _PROCESS.alphas_cumprod_prev
    beta = 1 - level / before
    mean = _column(np.sqrt(before) * beta / (1 - level)) * _X0
    mean += _column(np.sqrt(1 - beta) * (1 - before) / (1 - level)) * _X
    np.testing.assert_allclose(reverse.mean, mean, atol=1e-5)
    np.testing.assert_allclose(reverse.x0, _X0, atol=1e-5)

  def test_first_step_ends_at_the_predicted_example(self):
    t = jnp.zeros(len(_STEPS), jnp.int32)
    reverse = prediction_lib.reverse_step(_PROCESS, "x0", _X0, _X, t)
    np.testing.assert_allclose(reverse.mean, _X0, atol=1e-6)

  @parameterized.parameters(
    (-1.0, "posterior_log_variance"), (1.0, "log_betas"), (0.0, "middle")
  )
  def test_learned_variance_interpolates_in_the_logarithm(self, spread, name):
    low, high = _PROCESS.posterior_log_variance, np.log(_PROCESS.betas)
    expected = {
      "posterior_log_variance": low,
      "log_betas": high,
      "middle": (low + high) / 2,
    }
    out = jnp.concatenate([_X0, jnp.full(_SHAPE, spread)], axis=-1)
    reverse = prediction_lib.reverse_step(_PROCESS, "x0", out, _X, _T)
    chex.assert_shape(reverse.log_variance, _SHAPE)
    np.testing.assert_allclose(
      reverse.log_variance,
      np.broadcast_to(_column(expected[name]), _SHAPE),
      rtol=1e-5,
    )

  def test_variance_is_beta_without_a_learned_one(self):
    reverse = prediction_lib.reverse_step(_PROCESS, "x0", _X0, _X, _T)
    expected = np.log(_PROCESS.betas[list(_STEPS)])
    expected[0] = _PROCESS.posterior_log_variance[0]
    np.testing.assert_allclose(
      reverse.log_variance.ravel(), expected, rtol=1e-6
    )

  def test_process_of_one_step_is_finite(self):
    process = respace(_PROCESS, "1")
    t = jnp.zeros(len(_STEPS), jnp.int32)
    for out in (_X0, jnp.concatenate([_X0, _X0], axis=-1)):
      reverse = prediction_lib.reverse_step(process, "x0", out, _X, t)
      chex.assert_tree_all_finite(reverse)
      np.testing.assert_allclose(reverse.mean, _X0, atol=1e-6)

  def test_clip_bounds_the_example_before_the_mean(self):
    def step(x0, clip):
      return prediction_lib.reverse_step(_PROCESS, "x0", x0, _X, _T, clip=clip)

    chex.assert_trees_all_equal(
      step(4 * _X0, True), step(jnp.clip(4 * _X0, -1, 1), False)
    )
    self.assertGreater(float(jnp.abs(step(4 * _X0, False).x0).max()), 1.0)


if __name__ == "__main__":
  absltest.main()
