"""The noising process: schedules, tables, respacing, noised examples."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.models import diffusion as process_lib
from moh_jax.models.diffusion import Process, make_process, respace

_SCHEDULES = ("linear", "cosine")
_SPACINGS = ("1", "7", "250", "ddim25", "10,15,20")
_TABLES = (
  "alphas_cumprod_prev",
  "betas",
  "posterior_variance",
  "posterior_log_variance",
  "posterior_mean_x0",
  "posterior_mean_xt",
  "snr",
)


class ScheduleTest(parameterized.TestCase):
  @parameterized.product(schedule=_SCHEDULES, steps=(21, 100, 1000, 4000))
  def test_noise_grows_from_almost_none_to_almost_all(self, schedule, steps):
    process = make_process(schedule, steps)
    level = process.alphas_cumprod
    self.assertEqual(process.num_steps, steps)
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

  @parameterized.parameters(50, 1000)
  def test_cosine_level_is_that_of_the_formula(self, steps):
    def level(i):
      return math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [level(i + 1) / level(0) for i in range(steps - 1)]
    process = make_process("cosine", steps)
    np.testing.assert_allclose(process.alphas_cumprod[:-1], expected, rtol=1e-9)
    # There would be no signal left at all.
    self.assertAlmostEqual(process.betas[-1], 0.999)

  def test_unknown_schedule_lists_the_known(self):
    text = r"schedule='sqrt' must be one of \('linear', 'cosine', 'flow'\)"
    with self.assertRaisesRegex(ValueError, text):
      make_process("sqrt", 10)


class TablesTest(parameterized.TestCase):
  @parameterized.product(schedule=_SCHEDULES, spacing=_SPACINGS)
  def test_posterior_is_that_of_bayes_rule(self, schedule, spacing):
    process = respace(make_process(schedule, 1000), spacing)
    before, beta = process.alphas_cumprod_prev, process.betas
    # q(x_t | x_{t-1}) and q(x_{t-1} | x_0) as precisions of x_{t-1}.
    precision = (1 - beta)[1:] / beta[1:] + 1 / (1 - before[1:])
    variance = np.append(0.0, 1 / precision)
    np.testing.assert_allclose(process.posterior_variance, variance, rtol=1e-6)
    np.testing.assert_allclose(
      process.posterior_mean_xt, np.sqrt(1 - beta) / beta * variance, rtol=1e-6
    )
    from_x0 = np.sqrt(before[1:]) / (1 - before[1:]) * variance[1:]
    np.testing.assert_allclose(
      process.posterior_mean_x0, np.append(1.0, from_x0), rtol=1e-6
    )

  @parameterized.parameters(*_SPACINGS)
  def test_tables_are_finite_float64_of_the_number_of_steps(self, spacing):
    process = respace(make_process("linear", 1000), spacing)
    for name in _TABLES:
      table = getattr(process, name)
      chex.assert_shape(table, (process.num_steps,))
      self.assertEqual(table.dtype, np.float64)
      self.assertTrue(np.all(np.isfinite(table)), name)

  def test_log_variance_of_the_first_step_is_the_seconds(self):
    process = make_process("linear", 100)
    logs, variance = process.posterior_log_variance, process.posterior_variance
    self.assertEqual(variance[0], 0.0)
    np.testing.assert_allclose(np.exp(logs[1:]), variance[1:])
    self.assertEqual(logs[0], logs[1])

  def test_process_of_one_step(self):
    process = respace(make_process("linear", 1000), "1")
    self.assertEqual(process.timesteps.tolist(), [0])
    np.testing.assert_allclose(process.betas, 1e-4)
    # One step goes straight to the clean example.
    np.testing.assert_allclose(process.posterior_mean_x0, [1.0])
    np.testing.assert_allclose(process.posterior_mean_xt, [0.0])
    np.testing.assert_allclose(process.posterior_log_variance, np.log(1e-4))

  def test_snr_is_signal_over_noise(self):
    process = Process(np.arange(2), np.array([0.8, 0.5]))
    np.testing.assert_allclose(process.snr, [4.0, 1.0])


class RespaceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("1", [0]),
    ("2", [0, 19]),
    ("4", [0, 6, 13, 19]),
    (4, [0, 6, 13, 19]),
    ("ddim5", [0, 4, 8, 12, 16]),
    ("ddim10", list(range(0, 20, 2))),
    ("ddim7", [0, 3, 6, 9, 12, 15, 18]),
    ("2,3", [0, 9, 10, 14, 19]),
    ("1,1,1", [0, 7, 14]),
    (" 2, 1", [0, 9, 10]),
  )
  def test_keeps_these_of_twenty(self, spacing, expected):
    process = respace(make_process("cosine", 20), spacing)
    self.assertEqual(process.timesteps.tolist(), expected)

  @parameterized.parameters("1000", "ddim1000")
  def test_all_steps_change_nothing(self, spacing):
    whole = make_process("linear", 1000)
    process = respace(whole, spacing)
    np.testing.assert_array_equal(process.timesteps, whole.timesteps)
    np.testing.assert_array_equal(process.betas, whole.betas)

  @parameterized.parameters(*_SPACINGS)
  def test_noise_levels_are_those_of_the_kept_steps(self, spacing):
    whole = make_process("cosine", 1000)
    process = respace(whole, spacing)
    self.assertTrue(np.all(np.diff(process.timesteps) > 0))
    np.testing.assert_array_equal(
      process.alphas_cumprod, whole.alphas_cumprod[process.timesteps]
    )
    np.testing.assert_allclose(
      np.cumprod(1 - process.betas), process.alphas_cumprod
    )

  def test_respacing_twice_keeps_timesteps_of_the_training_process(self):
    once = respace(make_process("linear", 100), "ddim10")
    np.testing.assert_array_equal(respace(once, "2").timesteps, [0, 90])

  @parameterized.parameters("0", "", "-5", "ten", "5,0", "5,", "ddim", "ddim0")
  def test_text_without_positive_numbers_raises(self, spacing):
    with self.assertRaisesRegex(
      ValueError, f"^steps='{spacing}' must be N, 'ddimN' or 'N,M,...'"
    ):
      respace(make_process("linear", 100), spacing)

  @parameterized.parameters(
    ("101", "101 of the 100 timesteps in section 1 of 1; .* has 100"),
    ("10,51", "51 of the 50 timesteps in section 2 of 2; .* has 100"),
    ("34,34,1", "34 of the 33 timesteps in section 2 of 3; .* has 100"),
  )
  def test_more_steps_than_there_are_name_the_section(self, spacing, message):
    with self.assertRaisesRegex(ValueError, f"steps='{spacing}' .*{message}"):
      respace(make_process("linear", 100), spacing)

  @parameterized.parameters("ddim7", "ddim17")
  def test_stride_must_be_an_integer(self, spacing):
    process = make_process("cosine", 16)
    with self.assertRaisesRegex(
      ValueError, f"steps='{spacing}' must .*integer stride"
    ):
      respace(process, spacing)


class EvenLogSnrTest(parameterized.TestCase):
  @parameterized.product(schedule=_SCHEDULES, steps=(2, 20, 100))
  def test_log_snr_falls_evenly_between_the_ends(self, schedule, steps):
    whole = make_process(schedule, 1000)
    process = process_lib.even_log_snr(whole, steps)
    log_snr = np.log(process.snr)
    chex.assert_shape(log_snr, (steps,))
    ends = np.maximum(np.log(whole.snr)[[0, -1]], -10.2)  # then only noise
    np.testing.assert_allclose(log_snr[[0, -1]], ends, rtol=1e-6)
    gaps = np.diff(log_snr)
    np.testing.assert_allclose(gaps, gaps.mean(), rtol=1e-6)

  @parameterized.parameters(*_SCHEDULES)
  def test_times_are_where_the_process_has_these_levels(self, schedule):
    whole = make_process(schedule, 1000)
    process = process_lib.even_log_snr(whole, 30)
    times = process.timesteps
    self.assertEqual(times.dtype, np.float32)
    self.assertEqual(times[0], 0.0)
    if schedule == "linear":
      self.assertEqual(times[-1], 999.0)
    self.assertTrue(np.all(np.diff(times) > 0))
    below = whole.alphas_cumprod[np.ceil(times).astype(int)]
    above = whole.alphas_cumprod[np.floor(times).astype(int)]
    slack = 1e-6 * above
    self.assertTrue(np.all(process.alphas_cumprod >= below - slack))
    self.assertTrue(np.all(process.alphas_cumprod <= above + slack))


class NoisingTest(parameterized.TestCase):
  def test_each_example_has_its_own_step(self):
    process = make_process("linear", 100)
    t = jnp.array([0, 60, 99])
    x0, noise = jnp.full((3, 2, 2, 1), 2.0), jnp.full((3, 2, 2, 1), -1.0)
    level = process.alphas_cumprod[[0, 60, 99]]
    expected = 2 * np.sqrt(level) - np.sqrt(1 - level)
    x = process_lib.q_sample(process, x0, t, noise)
    chex.assert_shape(x, x0.shape)
    for i in range(3):
      np.testing.assert_allclose(x[i], expected[i], rtol=1e-6, atol=1e-7)

  @parameterized.parameters(0, 50, 199)
  def test_moments(self, step):
    process = make_process("linear", 200)
    noise = jax.random.normal(jax.random.key(0), (20_000, 1))
    t = jnp.full(20_000, step)
    x = process_lib.q_sample(process, jnp.full_like(noise, 3.0), t, noise)
    level = process.alphas_cumprod[step]
    self.assertAlmostEqual(float(x.mean()), 3 * np.sqrt(level), delta=0.03)
    self.assertAlmostEqual(float(x.var()), 1 - level, delta=0.03)

  @parameterized.parameters((1, (2,)), (2, (2, 1)), (4, (2, 1, 1, 1)))
  def test_lookup_broadcasts_over_the_other_axes(self, ndim, shape):
    table = np.array([0.1, 0.2, 0.3])
    values = process_lib.lookup(table, jnp.array([2, 0]), ndim)
    chex.assert_shape(values, shape)
    chex.assert_type(values, jnp.float32)
    np.testing.assert_allclose(values.ravel(), [0.3, 0.1])


if __name__ == "__main__":
  absltest.main()
