"""Samplers against exact denoisers of simple distributions; guidance."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.dit import DIFFUSION_METHODS, FLOW_METHODS
from moh_jax.models import samplers
from moh_jax.models.diffusion import (
  even_log_snr,
  even_times,
  make_process,
  respace,
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


def _gaussian(x, signal, spread, mean=2.0, deviation=0.5):
  """Mean of the clean example, which is normal, given x."""
  variance = deviation**2
  gain = signal * variance / (signal**2 * variance + spread**2)
  return mean + gain * (x - signal * mean)


def _velocity(x, t):
  """That of a flow of examples from N(2, 0.5^2); t is told times 1000."""
  t = jnp.reshape(t / 1000, (-1, 1, 1, 1))
  x0 = _gaussian(x, 1 - t, t)
  return (x - (1 - t) * x0) / t - x0


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


def _written_out(method, predict, process, noise, eta):
  """Every x from _Z on, as the papers write the steps, in float64."""
  x, path, last = np.asarray(_Z, np.float64), [], process.num_steps - 1
  previous = None
  level = process.alphas_cumprod
  half_log_snr = np.log(level / (1 - level)) / 2
  for step in range(last, -1, -1):
    t = jnp.full(len(x), process.timesteps[step])
    out = np.asarray(predict(jnp.float32(x), t), np.float64)
    at, before = level[step], level[step - 1] if step else 1.0
    x0 = (x - np.sqrt(1 - at) * out) / np.sqrt(at)
    variance = (1 - before) / (1 - at) * (1 - at / before)
    if method == "ddpm":  # arXiv:2006.11239, with variance beta
      beta = 1 - at / before
      x = (x - beta / np.sqrt(1 - at) * out) / np.sqrt(1 - beta)
      x = x + np.sqrt(beta) * noise(last - step) * (step > 0)
    elif method == "ddim":  # arXiv:2010.02502, equation 12
      sigma = eta * np.sqrt(variance)
      x = np.sqrt(before) * x0 + np.sqrt(1 - before - sigma**2) * out
      x = x + sigma * noise(last - step)
    elif step == 0:
      x = x0
    else:  # arXiv:2211.01095, algorithm 2
      h = half_log_snr[step - 1] - half_log_snr[step]
      data = x0
      if step < last:
        ratio = (half_log_snr[step] - half_log_snr[step + 1]) / h
        data = x0 + min(1 / ratio, 1) / 2 * (x0 - previous)
      x = np.sqrt((1 - before) / (1 - at)) * x
      x = x - np.sqrt(before) * np.expm1(-h) * data
    previous = x0
    path.append(x)
  return path


class PerfectDenoiserTest(parameterized.TestCase):
  @parameterized.product(
    method=DIFFUSION_METHODS,
    case=(*((p, "20") for p in _PREDICTIONS), ("v", "1"), ("v", "2")),
  )
  def test_returns_the_example(self, method, case):
    prediction, steps = case
    predict = _network(lambda x, signal, spread: _X0, prediction)
    run = _sampler(predict, method, steps, prediction, noise=_noise())
    np.testing.assert_allclose(run(_Z), _X0, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS, *FLOW_METHODS)
  def test_clips_the_example(self, method):
    predict, steps = _network(lambda x, signal, spread: 4 * _X0), "5"
    if method in FLOW_METHODS:
      predict, steps = (lambda x, t: _Z - 4 * _X0), "flow5"
    run = _sampler(predict, method, steps, noise=_noise(), clip=True)
    np.testing.assert_allclose(run(_Z), jnp.clip(4 * _X0, -1, 1), atol=1e-4)


class StepsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("ddpm", "5"), ("ddim", "5"), ("ddim", "5", 0.5), ("ddim", "5", 1.0),
    # Of equal steps in log-SNR, and of others whose history is bounded.
    ("dpm", "even6"), ("dpm", "ddim8"),
  )  # fmt: skip
  def test_trajectory_is_that_of_the_papers(self, method, spacing, eta=0.0):
    predict, process = _network(_two_gaussians), _process(spacing)
    run = _sampler(
      predict, method, spacing, noise=_noise(), eta=eta, trajectory=True
    )
    path = _written_out(method, predict, process, _noise(), eta)
    np.testing.assert_allclose(run(_Z), path, rtol=2e-4, atol=2e-4)

  @parameterized.parameters(
    ("euler", "flow5"), ("heun", "flow5"), ("heun", "flow1")
  )
  def test_trajectory_of_a_flow(self, method, spacing):
    process = _process(spacing)
    x, path = np.asarray(_Z, np.float64), []
    for here, after in itertools.pairwise([*process.times[::-1], 0.0]):
      slope = _velocity(x, 1000 * here)
      if method == "heun" and after:
        reached = x - (here - after) * slope
        slope = (slope + _velocity(reached, 1000 * after)) / 2
      x = x - (here - after) * slope
      path.append(x)
    run = _sampler(_velocity, method, spacing, trajectory=True)
    np.testing.assert_allclose(run(_Z), path, rtol=2e-4, atol=2e-4)


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
