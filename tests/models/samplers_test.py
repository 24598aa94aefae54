"""Samplers against exact denoisers of simple distributions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.dit import DIFFUSION_METHODS
from moh_jax.models import samplers
from moh_jax.models.diffusion import (
  Process,
  even_log_snr,
  make_process,
  respace,
  reverse_step,
)

_PREDICTIONS = ("epsilon", "x0", "v")
_TRAINING = make_process("linear", 1000)
_SHAPE = (3, 2, 2, 1)
_KEY = jax.random.key(0)
_Z = jax.random.normal(jax.random.key(1), _SHAPE)
_X0 = jax.random.normal(jax.random.key(2), _SHAPE) / 2


def _noise(shape=_SHAPE):
  return lambda step: jax.random.normal(jax.random.fold_in(_KEY, step), shape)


@functools.cache
def _network(denoise, prediction="epsilon", training=_TRAINING):
  """A network that knows the clean example, (x, signal, spread) -> x0."""
  log_snr = np.log(training.snr).astype(np.float32)
  timesteps = np.arange(training.num_steps, dtype=np.float32)

  def predict(x, t):
    value = jnp.interp(t.astype(jnp.float32), timesteps, log_snr)
    value = value.reshape(-1, *[1] * (x.ndim - 1))
    signal, spread = (jnp.sqrt(jax.nn.sigmoid(s)) for s in (value, -value))
    x0 = denoise(x, signal, spread)
    noise = (x - signal * x0) / spread
    velocity = signal * noise - spread * x0
    return {"epsilon": noise, "x0": x0, "v": velocity}[prediction]

  return predict


def _perfect(prediction="epsilon"):
  return _network(lambda x, signal, spread: _X0, prediction)


def _gaussian(x, signal, spread, mean=2.0, deviation=0.5):
  """Mean of the clean example, which is normal, given x."""
  variance = deviation**2
  gain = signal * variance / (signal**2 * variance + spread**2)
  return mean + gain * (x - signal * mean)


def _two_gaussians(x, signal, spread, deviation=0.2):
  """Mean of the clean example, near -1 or 1, given x; nonlinear in x."""
  variance = signal**2 * deviation**2 + spread**2
  gain = signal * deviation**2 / variance
  side = jnp.tanh(signal * x / variance)
  return gain * x + (1 - gain * signal) * side


def _process(spacing):
  """Steps of the training process; "evenN" at even log-SNR."""
  if spacing.startswith("even"):
    return even_log_snr(_TRAINING, int(spacing.removeprefix("even")))
  return respace(_TRAINING, spacing)


@functools.cache
def _sampler(predict, method, spacing, prediction="epsilon", **options):
  return jax.jit(
    functools.partial(
      samplers.sample,
      predict,
      process=_process(spacing),
      method=method,
      prediction=prediction,
      **options,
    )
  )


def _hand_ddpm(predict, x, process, noise):
  """Ancestral sampling step by step, the noisiest first."""
  path = []
  for number, step in enumerate(reversed(range(process.num_steps))):
    t = jnp.full(len(x), step)
    out = predict(x, jnp.asarray(process.timesteps)[t])
    reverse = reverse_step(process, "epsilon", out, x, t)
    x = reverse.mean
    if step:
      x += jnp.exp(0.5 * reverse.log_variance) * noise(number)
    path.append(x)
  return path


class PerfectDenoiserTest(parameterized.TestCase):
  @parameterized.product(method=DIFFUSION_METHODS, prediction=_PREDICTIONS)
  def test_returns_the_example(self, method, prediction):
    run = _sampler(
      _perfect(prediction), method, "20", prediction, noise=_noise()
    )
    np.testing.assert_allclose(run(_Z), _X0, atol=1e-4)

  @parameterized.product(method=DIFFUSION_METHODS, spacing=("1", "2"))
  def test_few_steps_return_the_example(self, method, spacing):
    run = _sampler(_perfect(), method, spacing, noise=_noise())
    np.testing.assert_allclose(run(_Z), _X0, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_clips_the_example(self, method):
    predict = _network(lambda x, signal, spread: 4 * _X0)
    run = _sampler(predict, method, "5", noise=_noise(), clip=True)
    expected = jnp.clip(4 * _X0, -1, 1)
    self.assertGreater(float(jnp.abs(4 * _X0).max()), 1.5)
    np.testing.assert_allclose(run(_Z), expected, atol=1e-4)


class StepsTest(parameterized.TestCase):
  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_network_is_told_timesteps_of_training_noisiest_first(self, method):
    told = []

    def predict(x, t):
      chex.assert_shape(t, (3,))
      chex.assert_type(t, jnp.int32)
      told.append(np.asarray(t))
      return x

    with jax.disable_jit():
      samplers.sample(
        predict,
        _Z,
        respace(_TRAINING, "4"),
        method=method,
        prediction="x0",
        noise=jnp.zeros_like,
      )
    expected = np.repeat([[999], [666], [333], [0]], 3, axis=1)
    np.testing.assert_array_equal(told, expected)

  def test_network_is_told_times_between_timesteps(self):
    told = []

    def predict(x, t):
      chex.assert_type(t, jnp.float32)
      told.append(np.asarray(t[0]))
      return x

    process = _process("even3")
    with jax.disable_jit():
      samplers.sample(predict, _Z, process, method="dpm", prediction="x0")
    np.testing.assert_allclose(told, process.timesteps[::-1])
    self.assertNotEqual(told[1], np.round(told[1]))

  def test_ddpm_equals_the_steps_by_hand(self):
    predict = _network(_gaussian)
    run = _sampler(predict, "ddpm", "5", noise=_noise(), trajectory=True)
    path = _hand_ddpm(predict, _Z, respace(_TRAINING, "5"), _noise())
    np.testing.assert_allclose(run(_Z), path, rtol=1e-4, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_trajectory_ends_with_the_sample(self, method):
    predict = _network(_gaussian)
    path, last = (
      _sampler(predict, method, "5", noise=_noise(), trajectory=keep)(_Z)
      for keep in (True, False)
    )
    chex.assert_shape(path, (5, *_SHAPE))
    np.testing.assert_allclose(path[-1], last, rtol=1e-6)
    moved = np.abs(np.diff(np.concatenate([_Z[None], path]), axis=0))
    self.assertTrue(np.all(moved.max((1, 2, 3, 4)) > 0))

  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_jit_equals_eager(self, method):
    noises = jax.random.normal(_KEY, (3, *_SHAPE))
    options = {"method": method, "noise": lambda step: noises[step]}
    process = respace(_TRAINING, "3")

    def predict(x, t):
      return jnp.tanh(x) * t.reshape(-1, 1, 1, 1) / 1000

    with jax.disable_jit():
      eager = samplers.sample(predict, _Z, process, **options)
    jitted = _sampler(predict, method, "3", noise=options["noise"])
    np.testing.assert_allclose(jitted(_Z), eager, rtol=1e-4, atol=1e-5)

  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_traces_once_whatever_the_steps_and_calls(self, method):
    traces = {}

    def run(spacing):
      def predict(x, t):
        traces[spacing] = traces.get(spacing, 0) + 1
        return x

      call = _sampler(predict, method, spacing, noise=_noise())
      call(_Z)
      first = traces[spacing]
      call(_Z + 1)
      self.assertEqual(traces[spacing], first)

    run("3")
    run("50")
    self.assertEqual(traces["3"], traces["50"])


class DistributionTest(parameterized.TestCase):
  @parameterized.parameters(("ddpm", "500"), ("ddim", "100"), ("dpm", "even20"))
  def test_gaussian_data_have_their_mean_and_variance(self, method, spacing):
    shape = (8192, 1, 1, 1)
    z = jax.random.normal(jax.random.key(3), shape)
    run = _sampler(_network(_gaussian), method, spacing, noise=_noise(shape))
    x = np.asarray(run(z))
    self.assertAlmostEqual(x.mean(), 2.0, delta=0.03)
    self.assertAlmostEqual(x.std(), 0.5, delta=0.03)

  def _errors(self, denoise, *samplings):
    """Mean distances of samples from those of very many steps."""
    z = jnp.linspace(-2.5, 2.5, 64).reshape(64, 1, 1, 1)
    limit = _sampler(_network(denoise), "ddim", "1000")(z)
    return [
      float(jnp.abs(_sampler(_network(denoise), *sampling)(z) - limit).mean())
      for sampling in samplings
    ]

  @parameterized.product(
    denoise=(_gaussian, _two_gaussians), spacing=("20", "50")
  )
  def test_solver_of_twenty_steps_is_nearer_the_limit_than_ddim(
    self, denoise, spacing
  ):
    solver, ddim = self._errors(denoise, ("dpm", "even20"), ("ddim", spacing))
    self.assertLess(solver, ddim)

  def test_solver_at_even_timesteps_is_nearer_the_limit_than_ddim(self):
    solver, ddim = self._errors(
      _gaussian, ("dpm", "ddim20"), ("ddim", "ddim20")
    )
    self.assertLess(solver, ddim)

  @parameterized.parameters(("ddim", "10", "50"), ("dpm", "even10", "even50"))
  def test_more_steps_are_nearer_the_limit(self, method, few, many):
    first, second = self._errors(_gaussian, (method, few), (method, many))
    self.assertLess(second, 0.5 * first)

  @parameterized.parameters(("ddim", 2), ("dpm", 4))
  def test_half_the_step_divides_the_error_by(self, method, factor):
    # Steps of equal log-SNR; all x of normal data keep their distance from the
    # mean in deviations.
    z, errors = 1.5, []
    for steps in (20, 40):
      level = 1 / (1 + np.exp(-2 * np.linspace(3, -3, steps)))
      process = Process(np.arange(steps), level)
      signal, spread = np.sqrt(level), np.sqrt(1 - level)
      deviation = np.sqrt(signal**2 / 4 + spread**2)
      place = (z - 2 * signal[-1]) / deviation[-1]
      last = 2 * signal[0] + place * deviation[0]
      x = samplers.sample(
        _network(_gaussian, training=process),
        jnp.full((1, 1, 1, 1), z),
        process,
        method=method,
      )
      expected = _gaussian(last, signal[0], spread[0])
      errors.append(abs(x.item() - expected))
    self.assertBetween(errors[0] / errors[1], 0.8 * factor, 1.2 * factor)

  @parameterized.parameters("ddim", "dpm")
  def test_deterministic_methods_read_no_noise(self, method):
    predict = _network(_gaussian)
    plain = _sampler(predict, method, "5")(_Z)
    chex.assert_trees_all_equal(
      _sampler(predict, method, "5", noise=_noise())(_Z), plain
    )

  def test_noise_changes_the_sample_and_repeats_it(self):
    def run(seed):
      def noise(step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.normal(key, _SHAPE)

      return _sampler(_network(_gaussian), "ddpm", "5", noise=noise)(_Z)

    chex.assert_trees_all_equal(run(0), run(0))
    self.assertGreater(float(jnp.abs(run(0) - run(1)).max()), 0.05)


class ErrorsTest(parameterized.TestCase):
  def _sample(self, **options):
    return samplers.sample(_perfect(), _Z, respace(_TRAINING, "2"), **options)

  def test_unknown_method_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"method='euler' must be one of \('ddpm', 'ddim', 'dpm'\)"
    ):
      self._sample(method="euler")

  def test_ddpm_needs_noise(self):
    with self.assertRaisesRegex(ValueError, "method='ddpm' needs noise"):
      self._sample(method="ddpm")

  def test_eta_needs_noise(self):
    with self.assertRaisesRegex(ValueError, "'ddim' needs noise .eta=0.5"):
      self._sample(method="ddim", eta=0.5)


class EtaTest(parameterized.TestCase):
  def test_0_adds_no_noise(self):
    plain = _sampler(_network(_gaussian), "ddim", "20")(_Z)
    given = _sampler(_network(_gaussian), "ddim", "20", noise=_noise(), eta=0.0)
    np.testing.assert_array_equal(given(_Z), plain)

  @parameterized.parameters((0.5, "100"), (1.0, "500"))
  def test_samples_have_the_mean_and_deviation_of_the_examples(
    self, eta, steps
  ):
    shape = (20_000, 1, 1, 1)
    z = jax.random.normal(jax.random.key(3), shape)
    run = _sampler(
      _network(_gaussian), "ddim", steps, noise=_noise(shape), eta=eta
    )
    out = run(z)
    self.assertAlmostEqual(float(out.mean()), 2.0, delta=0.02)
    self.assertAlmostEqual(float(out.std()), 0.5, delta=0.02)

  def test_1_has_the_variance_of_the_posterior(self):
    shape = (20_000, 1, 1, 1)
    x = jnp.ones(shape)
    process = respace(_TRAINING, "2")
    run = functools.partial(
      samplers.sample, _network(_gaussian), x, process, method="ddim",
      noise=_noise(shape), eta=1.0, trajectory=True,
    )  # fmt: skip
    spread = float(jax.jit(run)()[0].var())
    self.assertAlmostEqual(spread, process.posterior_variance[1], delta=0.02)


if __name__ == "__main__":
  absltest.main()
