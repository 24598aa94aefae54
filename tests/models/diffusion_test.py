"""Diffusion: schedules, tables, respacing, predictions and losses."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiffusionConfig
from moh_jax.models import diffusion
from moh_jax.models.diffusion import (
  Process,
  even_log_snr,
  make_process,
  predict_x0,
  q_sample,
  respace,
  reverse_step,
  training_target,
)

_SCHEDULES = ("linear", "cosine")
_SPACINGS = ("1", "7", "ddim25", "10,15,20")
_PREDICTIONS = ("epsilon", "x0", "v")
_PROCESS = make_process("linear", 100)
_STEPS = [1, 5, 40, 99]
_T = jnp.array(_STEPS)
_SHAPE = (len(_STEPS), 3, 2, 2)


def _normal(seed: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), _SHAPE)


_X0, _NOISE = _normal(0) / 2, _normal(1)
_X = q_sample(_PROCESS, _X0, _T, _NOISE)


def _target(prediction: str) -> jax.Array:
  return training_target(_PROCESS, prediction, _X0, _T, _NOISE)


def _column(table: np.ndarray) -> np.ndarray:
  """Values of a float64 table at every example's step."""
  return table[_STEPS][:, None, None, None]


class ScheduleTest(parameterized.TestCase):
  @parameterized.product(schedule=_SCHEDULES, steps=(21, 1000, 4000))
  def test_noise_grows_from_almost_none_to_almost_all(self, schedule, steps):
    process = make_process(schedule, steps)
    level = process.alphas_cumprod
    np.testing.assert_array_equal(process.timesteps, np.arange(steps))
    self.assertTrue(np.all(np.diff(level) < 0))
    self.assertTrue(np.all((process.betas > 0) & (process.betas < 1)))
    self.assertGreater(level[0], 0.98)
    self.assertBetween(level[-1], 0.0, 1e-4)

  @parameterized.parameters((1000, 1e-4, 0.02), (500, 2e-4, 0.04))
  def test_linear_betas_scale_with_the_number_of_steps(self, steps, low, high):
    betas = make_process("linear", steps).betas
    np.testing.assert_allclose(betas[[0, -1]], [low, high], rtol=1e-9)
    np.testing.assert_allclose(np.diff(betas), (high - low) / (steps - 1))

  def test_cosine_level_is_that_of_the_formula(self):
    def level(i):
      return math.cos((i / 50 + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [level(i + 1) / level(0) for i in range(49)]
    process = make_process("cosine", 50)
    np.testing.assert_allclose(process.alphas_cumprod[:-1], expected, rtol=1e-9)
    # There would be no signal left at all.
    self.assertAlmostEqual(process.betas[-1], 0.999)

  def test_path_of_a_flow_is_straight_from_example_to_noise(self):
    process, t = make_process("flow", 4), jnp.array([0, 1, 2, 3])
    np.testing.assert_allclose(process.timesteps, [1, 2, 3, 4])
    x = q_sample(process, _X0, t, _NOISE)
    for row, part in enumerate((0.25, 0.5, 0.75, 1.0)):
      expected = (1 - part) * _X0[row] + part * _NOISE[row]
      np.testing.assert_allclose(x[row], expected, atol=1e-6)

  def test_target_of_a_flow_is_the_derivative_of_the_path(self):
    process, t = make_process("flow", 1000), jnp.array([0, 500, 700, 998])
    ahead, here = (q_sample(process, _X0, t + i, _NOISE) for i in (1, 0))
    target = training_target(process, "velocity", _X0, t, _NOISE)
    np.testing.assert_allclose(target, (ahead - here) * 1000, atol=2e-3)


class TablesTest(parameterized.TestCase):
  @parameterized.product(schedule=_SCHEDULES, spacing=_SPACINGS)
  def test_posterior_is_that_of_bayes_rule(self, schedule, spacing):
    process = respace(make_process(schedule, 1000), spacing)
    before, beta = process.alphas_cumprod_prev, process.betas
    # q(x_t | x_{t-1}) and q(x_{t-1} | x_0) as precisions of x_{t-1}.
    precision = (1 - beta)[1:] / beta[1:] + 1 / (1 - before[1:])
    variance = np.append(0.0, 1 / precision)
    from_x0 = np.sqrt(before[1:]) / (1 - before[1:]) * variance[1:]
    expected = {
      "posterior_variance": variance,
      "posterior_mean_xt": np.sqrt(1 - beta) / beta * variance,
      "posterior_mean_x0": np.append(1.0, from_x0),
    }
    for name, table in expected.items():
      found = getattr(process, name)
      self.assertEqual(found.dtype, np.float64)
      np.testing.assert_allclose(found, table, rtol=1e-6)

  def test_log_variance_of_the_first_step_is_the_seconds(self):
    logs = _PROCESS.posterior_log_variance
    variance = _PROCESS.posterior_variance
    self.assertEqual(variance[0], 0.0)
    np.testing.assert_allclose(np.exp(logs[1:]), variance[1:])
    self.assertEqual(logs[0], logs[1])

  def test_process_of_one_step_goes_straight_to_the_example(self):
    process = respace(make_process("linear", 1000), "1")
    self.assertEqual(process.timesteps.tolist(), [0])
    np.testing.assert_allclose(process.posterior_log_variance, np.log(1e-4))
    t = jnp.zeros(len(_STEPS), jnp.int32)
    for out in (_X0, jnp.concatenate([_X0, _X0], axis=-1)):
      reverse = reverse_step(process, "x0", out, _X, t)
      chex.assert_tree_all_finite(reverse)
      np.testing.assert_allclose(reverse.mean, _X0, atol=1e-6)

  def test_first_steps_are_the_least_noisy(self):
    for process in (_PROCESS, make_process("flow", 100)):
      first = process.first(3)
      np.testing.assert_array_equal(first.timesteps, process.timesteps[:3])
      np.testing.assert_array_equal(first.spread, process.spread[:3])

  def test_snr_is_signal_over_noise(self):
    process = Process(np.arange(2), np.array([0.8, 0.5]))
    np.testing.assert_allclose(process.snr, [4.0, 1.0])

  def test_each_example_is_noised_at_its_own_step(self):
    level = _column(_PROCESS.alphas_cumprod)
    expected = np.sqrt(level) * _X0 + np.sqrt(1 - level) * _NOISE
    np.testing.assert_allclose(_X, expected, rtol=1e-5, atol=1e-6)


class RespaceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("1", [0]),
    ("2", [0, 19]),
    (4, [0, 6, 13, 19]),
    ("ddim5", [0, 4, 8, 12, 16]),
    ("ddim7", [0, 3, 6, 9, 12, 15, 18]),
    ("2,3", [0, 9, 10, 14, 19]),
    ("1,1,1", [0, 7, 14]),
    (" 2, 1", [0, 9, 10]),
    ("20", list(range(20))),
    ("ddim20", list(range(20))),
  )
  def test_keeps_these_of_twenty(self, spacing, expected):
    whole = make_process("cosine", 20)
    process = respace(whole, spacing)
    self.assertEqual(process.timesteps.tolist(), expected)
    np.testing.assert_array_equal(
      process.alphas_cumprod, whole.alphas_cumprod[expected]
    )

  def test_respacing_twice_keeps_timesteps_of_the_training_process(self):
    once = respace(_PROCESS, "ddim10")
    np.testing.assert_array_equal(respace(once, "2").timesteps, [0, 90])

  @parameterized.parameters(
    *((text, "N, 'ddimN' or 'N,M") for text in ("0", "", "-5", "5,", "ddim0")),
    ("101", "101 of the 100 timesteps in section 1 of 1; .* has 100"),
    ("34,34,1", "34 of the 33 timesteps in section 2 of 3; .* has 100"),
    ("ddim40", "integer stride"),
  )
  def test_impossible_steps_are_named(self, spacing, message):
    with self.assertRaisesRegex(ValueError, f"steps='{spacing}' .*{message}"):
      respace(_PROCESS, spacing)

  @parameterized.product(schedule=_SCHEDULES, steps=(2, 30))
  def test_even_log_snr(self, schedule, steps):
    whole = make_process(schedule, 1000)
    process = even_log_snr(whole, steps)
    log_snr = np.log(process.snr)
    chex.assert_shape(log_snr, (steps,))
    ends = np.maximum(np.log(whole.snr)[[0, -1]], -10.2)  # then only noise
    np.testing.assert_allclose(log_snr[[0, -1]], ends, rtol=1e-6)
    gaps = np.diff(log_snr)
    np.testing.assert_allclose(gaps, gaps.mean(), rtol=1e-6)
    # The network is told the times at which the process has these levels.
    times = process.timesteps
    self.assertEqual(times.dtype, np.float32)
    self.assertTrue(np.all(np.diff(times) > 0))
    below = whole.alphas_cumprod[np.ceil(times).astype(int)]
    above = whole.alphas_cumprod[np.floor(times).astype(int)] * (1 + 1e-6)
    self.assertTrue(np.all(process.alphas_cumprod >= below * (1 - 1e-6)))
    self.assertTrue(np.all(process.alphas_cumprod <= above))


class PredictionTest(parameterized.TestCase):
  @parameterized.parameters(*_PREDICTIONS)
  def test_exact_target_gives_example_and_posterior(self, prediction):
    x0, _ = predict_x0(_PROCESS, prediction, _target(prediction), _X, _T)
    np.testing.assert_allclose(x0, _X0, atol=2e-4)
    reverse = reverse_step(_PROCESS, prediction, _target(prediction), _X, _T)
    level, before = _PROCESS.alphas_cumprod, _PROCESS.alphas_cumprod_prev
    beta = 1 - level / before
    mean = _column(np.sqrt(before) * beta / (1 - level)) * _X0
    mean += _column(np.sqrt(1 - beta) * (1 - before) / (1 - level)) * _X
    np.testing.assert_allclose(reverse.mean, mean, atol=1e-5)

  def test_clean_example_implies_its_noise_and_targets(self):
    noise = diffusion.implied_noise(_PROCESS, _X0, _X, _T)
    np.testing.assert_allclose(noise, _NOISE, atol=1e-4)
    level = _column(_PROCESS.alphas_cumprod)
    velocity = np.sqrt(level) * _NOISE - np.sqrt(1 - level) * _X0
    chex.assert_trees_all_equal(_target("epsilon"), _NOISE)
    chex.assert_trees_all_equal(_target("x0"), _X0)
    np.testing.assert_allclose(_target("v"), velocity, atol=1e-6)

  def test_output_is_split_into_prediction_and_variance(self):
    out = jnp.arange(12.0).reshape(1, 2, 1, 6)
    value, spread = diffusion.split_output(out, 3)
    chex.assert_trees_all_equal(jnp.concatenate([value, spread], -1), out)
    self.assertIsNone(diffusion.split_output(out, 6)[1])
    with self.assertRaisesRegex(
      ValueError, "6 output channels must be 2, or 4"
    ):
      diffusion.split_output(out, 2)

  @parameterized.parameters((-1.0, 0.0), (1.0, 1.0), (0.0, 0.5))
  def test_learned_variance_interpolates_in_the_logarithm(self, spread, share):
    low, high = _PROCESS.posterior_log_variance, np.log(_PROCESS.betas)
    out = jnp.concatenate([_X0, jnp.full(_SHAPE, spread)], axis=-1)
    reverse = reverse_step(_PROCESS, "x0", out, _X, _T)
    expected = _column(low + share * (high - low))
    np.testing.assert_allclose(
      reverse.log_variance, np.broadcast_to(expected, _SHAPE), rtol=1e-5
    )

  def test_variance_is_beta_without_a_learned_one(self):
    t = jnp.array([0, *_STEPS[1:]])
    reverse = reverse_step(_PROCESS, "x0", _X0, _X, t)
    expected = np.log(_PROCESS.betas[np.asarray(t)])
    expected[0] = _PROCESS.posterior_log_variance[0]
    np.testing.assert_allclose(
      reverse.log_variance.ravel(), expected, rtol=1e-6
    )
    np.testing.assert_allclose(reverse.mean[0], _X0[0], atol=1e-6)

  def test_clip_bounds_the_example_before_the_mean(self):
    def step(x0, clip):
      return reverse_step(_PROCESS, "x0", x0, _X, _T, clip=clip)

    chex.assert_trees_all_equal(
      step(4 * _X0, True), step(jnp.clip(4 * _X0, -1, 1), False)
    )
    self.assertGreater(float(jnp.abs(step(4 * _X0, False).x0).max()), 1.0)


def _losses(prediction: str, out: jax.Array, **fields) -> dict:
  """The losses; without `vb_weight` the bound counts nothing in "loss"."""
  fields = {"vb_weight": 0.0, **fields}
  return _jitted_losses(DiffusionConfig(prediction=prediction, **fields), out)


@functools.partial(jax.jit, static_argnums=0)
def _jitted_losses(objective: DiffusionConfig, out: jax.Array) -> dict:
  return diffusion.training_losses(
    _PROCESS, objective, out, _X0, _X, _T, _NOISE
  )


def _out(prediction: str, spread: float, error: float = 0.0) -> jax.Array:
  """The exact target with an error, and one variance output everywhere."""
  target = _target(prediction) + error * _normal(2)
  return jnp.concatenate([target, jnp.full(_SHAPE, spread)], axis=-1)


class SquaredErrorTest(parameterized.TestCase):
  @parameterized.parameters(*_PREDICTIONS)
  def test_is_the_mean_of_each_example(self, prediction):
    scale = jnp.arange(1.0, 5.0)[:, None, None, None]
    losses = _losses(prediction, _target(prediction) + scale)
    self.assertCountEqual(losses, ["mse", "loss"])
    for loss in losses.values():
      np.testing.assert_allclose(loss, [1.0, 4.0, 9.0, 16.0], rtol=1e-5)

  def test_is_that_of_the_velocity_for_a_flow(self):
    process = make_process("flow", 100)
    x = q_sample(process, _X0, _T, _NOISE)
    objective = DiffusionConfig(schedule="flow", prediction="velocity")
    losses = diffusion.training_losses(
      process, objective, _NOISE - _X0 + 2, _X0, x, _T, _NOISE
    )
    np.testing.assert_allclose(losses["loss"], 4, rtol=1e-5)

  def test_bfloat16_outputs_are_compared_in_float32(self):
    out = _out("epsilon", 0.0, error=1.0).astype(jnp.bfloat16)
    losses, expected = (
      _losses("epsilon", x) for x in (out, out.astype(jnp.float32))
    )
    chex.assert_type(list(losses.values()), jnp.float32)
    chex.assert_trees_all_equal(losses, expected)

  @parameterized.product(prediction=_PREDICTIONS, gamma=(0.5, 5.0))
  def test_min_snr_weighs_the_error_of_the_clean_example(
    self, prediction, gamma
  ):
    out = _target(prediction) + _normal(2)
    losses = _losses(prediction, out, loss_weight="min_snr", snr_gamma=gamma)
    x0, _ = predict_x0(_PROCESS, prediction, out, _X, _T)
    error = np.square(np.asarray(x0 - _X0, np.float64)).mean((1, 2, 3))
    level = _PROCESS.alphas_cumprod[_STEPS]
    expected = np.minimum(level / (1 - level), gamma) * error
    np.testing.assert_allclose(losses["loss"], expected, rtol=2e-3)


class BoundTest(parameterized.TestCase):
  """The variational bound after the first step."""

  @parameterized.parameters(*_PREDICTIONS)
  def test_true_posterior_costs_nothing(self, prediction):
    bound = _losses(prediction, _out(prediction, spread=-1.0))["vb"]
    np.testing.assert_allclose(bound, 0.0, atol=1e-5)

  def test_costs_what_two_gaussians_differ_by(self):
    variance = _PROCESS.posterior_variance[_STEPS]
    ratio = variance / _PROCESS.betas[_STEPS]
    moved = _PROCESS.posterior_mean_x0[_STEPS] ** 2
    moved *= np.square(0.1 * np.asarray(_normal(2))).mean((1, 2, 3))
    for out, nats in (
      (_out("x0", spread=1.0), 0.5 * (ratio - 1 - np.log(ratio))),
      (_out("x0", spread=-1.0, error=0.1), moved / (2 * variance)),
    ):
      bits = nats / math.log(2)
      bound = _losses("x0", out)["vb"]
      np.testing.assert_allclose(bound, bits, rtol=1e-3, atol=1e-6)

  @parameterized.parameters(("vb", 0, 2), ("loss", 2, 0))
  def test_gradients_reach_prediction_or_variance(self, loss, none, some):
    def total(out):
      return _losses("v", out)[loss].sum()

    grad = jax.grad(total)(_out("v", spread=0.3, error=0.5))
    np.testing.assert_array_equal(grad[..., none : none + 2], 0.0)
    # Except the last step, where both ends of the variance all but meet.
    size = np.abs(grad[:-1, ..., some : some + 2]).max((1, 2, 3))
    self.assertTrue(np.all(size > 1e-6))


_bound = jax.jit(
  diffusion.variational_bound, static_argnames=("process", "prediction")
)


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

  def _bound(self, out, t=None) -> jax.Array:
    t = self.t if t is None else t
    return _bound(_PROCESS, "x0", jnp.asarray(out), self.x, self.x, t)

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
    self.assertTrue(np.all((bound > 0.5 * floor) & (bound <= floor + 1e-3)))
    grad = jax.grad(lambda out: self._bound(out).sum())(self.out)
    chex.assert_tree_all_finite(grad)

  def test_only_the_first_step_is_a_likelihood(self):
    both = self._bound(self.out, jnp.array([0, 1]))
    later = self._bound(self.out, jnp.array([1, 1]))
    np.testing.assert_allclose(both[0], self._bound(self.out)[0], rtol=1e-6)
    np.testing.assert_allclose(both[1], later[1], rtol=1e-6)
