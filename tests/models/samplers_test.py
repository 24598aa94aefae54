"""Samplers against exact denoisers of simple distributions; guidance."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.dit import DIFFUSION_METHODS, FLOW_METHODS
from moh_jax.models import samplers
from moh_jax.models.diffusion import (
  Process,
  even_log_snr,
  even_times,
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
  """Steps of the training process; "evenN" at even log-SNR, "flowN" a flow."""
  if spacing.startswith("flow"):
    return even_times(int(spacing.removeprefix("flow")), 1000)
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
  @parameterized.product(
    method=DIFFUSION_METHODS,
    case=(*((p, "20") for p in _PREDICTIONS), ("v", "1"), ("v", "2")),
  )
  def test_returns_the_example(self, method, case):
    prediction, steps = case
    run = _sampler(
      _perfect(prediction), method, steps, prediction, noise=_noise()
    )
    np.testing.assert_allclose(run(_Z), _X0, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS)
  def test_clips_the_example(self, method):
    predict = _network(lambda x, signal, spread: 4 * _X0)
    run = _sampler(predict, method, "5", noise=_noise(), clip=True)
    expected = jnp.clip(4 * _X0, -1, 1)
    self.assertGreater(float(jnp.abs(4 * _X0).max()), 1.5)
    np.testing.assert_allclose(run(_Z), expected, atol=1e-4)


class StepsTest(parameterized.TestCase):
  @parameterized.parameters(
    *((method, "4", [999, 666, 333, 0]) for method in DIFFUSION_METHODS),
    ("dpm", "even3", None),
    ("euler", "flow4", [1000, 750, 500, 250]),
    ("heun", "flow4", [1000, 750, 750, 500, 500, 250, 250]),
  )
  def test_network_is_told_its_timesteps_noisiest_first(
    self, method, spacing, expected
  ):
    told = []
    process = _process(spacing)

    def predict(x, t):
      chex.assert_shape(t, (3,))
      chex.assert_type(t, process.timesteps.dtype)
      told.append(float(t[0]))
      return x

    how = {"method": method, "prediction": "x0", "noise": jnp.zeros_like}
    with jax.disable_jit():
      samplers.sample(predict, _Z, process, **how)
    if expected is None:  # times between two timesteps of training
      expected = process.timesteps[::-1]
      self.assertNotEqual(told[1], np.round(told[1]))
    np.testing.assert_allclose(told, expected)

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


class DistributionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("ddpm", "500", 0.0), ("ddim", "100", 0.0), ("dpm", "even20", 0.0),
    ("ddim", "100", 0.5), ("ddim", "500", 1.0),
  )  # fmt: skip
  def test_gaussian_data_have_their_mean_and_deviation(
    self, method, spacing, eta
  ):
    shape = (20_000, 1, 1, 1)
    z, noise = jax.random.normal(jax.random.key(3), shape), _noise(shape)
    network = _network(_gaussian)
    x = np.asarray(_sampler(network, method, spacing, noise=noise, eta=eta)(z))
    self.assertAlmostEqual(x.mean(), 2.0, delta=0.02)
    self.assertAlmostEqual(x.std(), 0.5, delta=0.02 if eta else 0.03)

  @parameterized.parameters(
    (_gaussian, 1, ("dpm", "even20"), ("ddim", "50")),
    (_two_gaussians, 1, ("dpm", "even20"), ("ddim", "50")),
    # Of unequal steps; 1.5 times without the bound on the history.
    (_gaussian, 8, ("dpm", "ddim20"), ("ddim", "ddim20")),
  )
  def test_solver_is_nearer_the_limit_than_ddim(
    self, denoise, times, *samplings
  ):
    z = jnp.linspace(-2.5, 2.5, 64).reshape(64, 1, 1, 1)
    solver, ddim, limit = (
      _sampler(_network(denoise), *sampling)(z)
      for sampling in (*samplings, ("ddim", "1000"))
    )
    gaps = [float(jnp.abs(x - limit).mean()) for x in (solver, ddim)]
    self.assertLess(times * gaps[0], gaps[1])

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
    given = _sampler(predict, method, "5", noise=_noise(), eta=0.0)(_Z)
    chex.assert_trees_all_equal(given, plain)

  def test_eta_of_1_has_the_variance_of_the_posterior(self):
    shape = (20_000, 1, 1, 1)
    x = jnp.ones(shape)
    process = respace(_TRAINING, "2")
    run = functools.partial(
      samplers.sample, _network(_gaussian), x, process, method="ddim",
      noise=_noise(shape), eta=1.0, trajectory=True,
    )  # fmt: skip
    spread = float(jax.jit(run)()[0].var())
    self.assertAlmostEqual(spread, process.posterior_variance[1], delta=0.02)


def _flow_of_a_gaussian(x, t):
  """Velocity of examples from N(2, 0.5^2); the network reads t times 1000."""
  t = (t / 1000).reshape(-1, 1, 1, 1)
  x0 = _gaussian(x, 1 - t, t)
  return (x - (1 - t) * x0) / t - x0


class FlowTest(parameterized.TestCase):
  @parameterized.product(method=FLOW_METHODS, steps=(1, 7))
  def test_straight_lines_are_exact(self, method, steps):
    run = _sampler(lambda x, t: _Z - _X0, method, f"flow{steps}")
    np.testing.assert_allclose(run(_Z), _X0, atol=1e-5)

  @parameterized.parameters(("euler", 0.06, 1.7), ("heun", 0.002, 3.0))
  def test_error_of_a_gaussian_falls_with_the_order(self, method, most, ratio):
    exact = 2.0 + 0.5 * _Z
    few, many = (
      float(jnp.abs(run(_Z) - exact).max())
      for run in (
        _sampler(_flow_of_a_gaussian, method, f"flow{n}") for n in (20, 40)
      )
    )
    self.assertLess(many, most)
    self.assertGreater(few / many, ratio)

  @parameterized.parameters(*FLOW_METHODS)
  def test_clips_the_example(self, method):
    run = _sampler(lambda x, t: _Z - 4 * _X0, method, "flow5", clip=True)
    np.testing.assert_allclose(run(_Z), jnp.clip(4 * _X0, -1, 1), atol=1e-4)


_B, _NO_LABEL = 2, 5
_LABELS = jnp.array([3, 1])


@jax.jit
def _predict(x, t, labels):
  """Depends on every input; the last channel tells an example's label."""
  number = labels.astype(jnp.float32)[:, None, None, None]
  time = t.astype(jnp.float32)[:, None, None, None]
  told = 0 * x[..., :1] + number
  return jnp.concatenate([x + number * x**2 + time, told], -1)


def _guided(x, step, batches=None, **options):
  """What `guide` gives at a step; the sizes of batches that it evaluates."""

  def predict(x, t, labels):
    chex.assert_equal_shape_prefix((x, t, labels), 1)
    if batches is not None:
      batches.append(len(x))
    return _predict(x, t, labels)

  guided = samplers.guide(predict, _LABELS, _NO_LABEL, **options)
  return jax.jit(guided)(x, jnp.full(_B, step))


@functools.partial(jax.jit, static_argnames=("scale", "count"))
def _by_hand(x, step, scale, count):
  """Guided by two evaluations; only the first `count` channels."""
  t = jnp.full(_B, step)
  labelled = _predict(x, t, _LABELS)
  free = _predict(x, t, jnp.full(_B, _NO_LABEL))
  moved = free + scale * (labelled - free)
  return jnp.concatenate([moved[..., :count], labelled[..., count:]], -1)


class GuidanceTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"channels": "three"}, 4, 3), ({}, 4, 3), ({"channels": "all"}, 4, 4),
    ({"channels": "three"}, 2, 2), ({"channels": "all"}, 1, 1),
  )  # fmt: skip
  def test_moves_these_channels_and_no_other(self, options, size, count):
    x, batches = jax.random.normal(_KEY, (_B, 2, 3, size)), []
    out = _guided(x, 7, batches, scale=2.5, **options)
    expected = _by_hand(x, 7, 2.5, count)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    # The variance, after the prediction, is the labelled one.
    chex.assert_trees_all_close(out[..., count:], expected[..., count:])
    self.assertEqual(batches, [2 * _B])

  @parameterized.product(scale=(0, 1), interval=(None, (0, 5)))
  def test_scales_0_and_1_are_one_evaluation(self, scale, interval):
    x, batches = jax.random.normal(_KEY, (_B, 2, 3, 4)), []
    out = _guided(x, 2, batches, scale=scale, interval=interval)
    labels = _LABELS if scale else jnp.full(_B, _NO_LABEL)
    expected = _predict(x, jnp.full(_B, 2), labels)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    self.assertEqual(batches, [_B])

  @parameterized.parameters(
    (0, False), (9, False), (10, True), (19, True), (20, False), (99, False)
  )
  def test_guides_from_low_to_before_high(self, step, guided):
    x, batches = jax.random.normal(_KEY, (_B, 2, 3, 4)), []
    out = _guided(x, step, batches, scale=4.0, interval=(10, 20))
    expected = _by_hand(x, step, 4.0 if guided else 1.0, 3)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    self.assertCountEqual(set(batches), {_B, 2 * _B})  # branches

  @parameterized.parameters(0.0, 0.1, 0.5)
  def test_drops_this_share_of_labels(self, rate):
    labels = jnp.arange(20_000) % _NO_LABEL
    kept = samplers.drop_labels(jax.random.key(0), labels, _NO_LABEL, rate)
    chex.assert_type(kept, labels.dtype)
    dropped = np.asarray(kept == _NO_LABEL)
    self.assertAlmostEqual(dropped.mean(), rate, delta=0.015 if rate else 0)
    chex.assert_trees_all_equal(kept[~dropped], labels[~dropped])
    again = samplers.drop_labels(jax.random.key(1), labels, _NO_LABEL, rate)
    self.assertEqual(bool((kept != again).any()), rate > 0)
