"""Diffusion: schedules, predictions, losses, drawing, and the samplers.

The release's tables, losses, gradients and steps are those of tests/parity;
samplers meet exact denoisers of simple distributions.
"""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import DiffusionConfig
from moh_jax.config.dit import DIFFUSION_METHODS, FLOW_METHODS
from moh_jax.models import diffusion, generation, samplers
from moh_jax.models.diffusion import (
  even_log_snr,
  even_times,
  make_process,
  q_sample,
  respace,
  reverse_step,
  training_target,
)
from tests.models import small

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


class ProcessTest(parameterized.TestCase):
  def test_linear_betas_scale_with_the_number_of_steps(self):
    betas = make_process("linear", 500).betas
    np.testing.assert_allclose(betas, np.linspace(2e-4, 0.04, 500), rtol=1e-9)

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

  def test_process_of_one_step_goes_straight_to_the_example(self):
    process = respace(make_process("linear", 1000), "1")
    self.assertEqual(process.timesteps.tolist(), [0])
    np.testing.assert_allclose(process.posterior_log_variance, np.log(1e-4))
    t = jnp.zeros(len(_STEPS), jnp.int32)
    for out in (_X0, jnp.concatenate([_X0, _X0], axis=-1)):
      reverse = reverse_step(process, "x0", out, _X, t)
      chex.assert_tree_all_finite(reverse)
      np.testing.assert_allclose(reverse.mean, _X0, atol=1e-6)

  @parameterized.parameters(
    ("1", [0]),
    (4, [0, 6, 13, 19]),
    ("ddim7", [0, 3, 6, 9, 12, 15, 18]),
    ("2,3", [0, 9, 10, 14, 19]),
    (" 2, 1", [0, 9, 10]),
    ("ddim20", list(range(20))),
  )
  def test_keeps_these_of_twenty(self, spacing, expected):
    whole = make_process("cosine", 20)
    process = respace(whole, spacing)
    self.assertEqual(process.timesteps.tolist(), expected)
    np.testing.assert_array_equal(
      process.alphas_cumprod, whole.alphas_cumprod[expected]
    )

  @parameterized.parameters(
    *((text, "N, 'ddimN' or 'N,M") for text in ("0", "", "-5", "5,", "ddim0")),
    ("101", "101 of the 100 timesteps in section 1 of 1; .* has 100"),
    ("34,34,1", "34 of the 33 timesteps in section 2 of 3; .* has 100"),
    ("ddim40", "integer stride"),
  )
  def test_impossible_steps_are_named(self, spacing, message):
    with self.assertRaisesRegex(ValueError, f"steps='{spacing}' .*{message}"):
      respace(_PROCESS, spacing)

  @parameterized.product(schedule=("linear", "cosine"), steps=(2, 30))
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


@functools.partial(jax.jit, static_argnums=0)
def _compiled_losses(objective: DiffusionConfig, out: jax.Array) -> dict:
  return diffusion.training_losses(
    _PROCESS, objective, out, _X0, _X, _T, _NOISE
  )


def _losses(prediction: str, out: jax.Array, **fields) -> dict:
  return _compiled_losses(DiffusionConfig(prediction=prediction, **fields), out)


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
    out = _out("epsilon", 0.3, error=1.0).astype(jnp.bfloat16)
    losses, expected = (
      _losses("epsilon", x) for x in (out, out.astype(jnp.float32))
    )
    chex.assert_type(list(losses.values()), jnp.float32)
    chex.assert_trees_all_equal(losses, expected)


class BoundTest(absltest.TestCase):
  """The variational bound, and in it 8-bit pixels at the first step."""

  def test_costs_what_two_gaussians_differ_by(self):
    variance = _PROCESS.posterior_variance[_STEPS]
    ratio = variance / _PROCESS.betas[_STEPS]
    moved = _PROCESS.posterior_mean_x0[_STEPS] ** 2
    moved *= np.square(0.1 * np.asarray(_normal(2))).mean((1, 2, 3))
    for out, nats in (
      (_out("x0", spread=1.0), 0.5 * (ratio - 1 - np.log(ratio))),
      (_out("x0", spread=-1.0, error=0.1), moved / (2 * variance)),
    ):
      losses = _losses("x0", out, vb_weight=3.0)
      bound = losses["vb"]
      np.testing.assert_allclose(
        bound, nats / math.log(2), rtol=1e-3, atol=1e-6
      )
      np.testing.assert_allclose(losses["loss"], losses["mse"] + 3 * bound)

  def test_first_step_is_the_exact_likelihood_of_the_bins(self):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(2, 4, 4, 1))
    pixels[:, 0, 0], pixels[:, 0, 1] = 0, 255  # their bins are open
    x0, t = np.float32(pixels / 127.5 - 1), jnp.zeros(2, jnp.int32)
    near = np.float32(x0 + rng.normal(size=x0.shape) * 0.01)
    out = jnp.concatenate([near, 0 * x0], axis=-1)

    @jax.jit
    def bound(out):
      return diffusion.variational_bound(_PROCESS, "x0", out, x0, x0, t)

    reverse = reverse_step(_PROCESS, "x0", out, x0, t)
    mean = np.asarray(reverse.mean, np.float64)
    scale = np.exp(0.5 * np.asarray(reverse.log_variance, np.float64))

    def cdf(edge):
      return 0.5 * (1 + np.vectorize(math.erf)((edge - mean) / scale / 2**0.5))

    below = np.where(x0 < -0.999, 0.0, cdf(x0 - 1 / 255))
    above = np.where(x0 > 0.999, 1.0, cdf(x0 + 1 / 255))
    bits = -np.log2(above - below).mean((1, 2, 3))
    # The release's distribution function is an approximation.
    np.testing.assert_allclose(bound(out), bits, rtol=2e-3)
    # What is impossible costs a bounded amount, and all gradients are finite.
    worst = bound(jnp.concatenate([x0 + 1.5, 0 * x0], axis=-1))
    floor = -math.log2(1e-12)
    self.assertTrue(np.all((worst > 0.5 * floor) & (worst <= floor + 1e-3)))
    chex.assert_tree_all_finite(jax.grad(lambda out: bound(out).sum())(out))


_CONFIG = config_lib.Config(
  model=dataclasses.replace(
    small.DIT,
    input_size=(4, 4),
    channels=1,
    learn_sigma=False,
    num_heads=(2,),
    shared_heads=(1,),
    top_k=(1,),
  ),
  data=config_lib.DataConfig(mean=(0.5,), std=(0.5,)),
  diffusion=config_lib.DiffusionConfig(space="pixel", steps=100),
  sample=config_lib.SampleConfig(steps="5", cfg_scale=2.0),
)
_LATENT = config_lib.apply_overrides(
  _CONFIG, "diffusion", space="latent", latent_shift=0.5
)
_INDEX = np.array([5, 0, 9, 2])
_LABELS = np.array([2, 1, 0, 1])


def _sampling(config=_CONFIG, **changes):
  return config_lib.apply_overrides(config, "sample", **changes)


_MODEL = small.network(_CONFIG.model)


def _params():
  return small.random_variables(_CONFIG.model)["params"]


@functools.cache
def _drawer(config):
  return jax.jit(generation.make_sampler(_MODEL, config))


def _draw(config=_CONFIG, seed=7, index=_INDEX, labels=_LABELS) -> np.ndarray:
  return np.asarray(_drawer(config)(_params(), seed, index, labels))


class DrawTest(parameterized.TestCase):
  def _called(self, config) -> dict:
    """What the sampler is called with."""
    called = {}

    def sample(predict, x, process, **options):
      del predict
      called.update(options, x=x, process=process)
      called["noises"] = [options["noise"](step) for step in range(2)]
      return x

    with mock.patch.object(generation, "sample", sample):
      draw = generation.make_sampler(_MODEL, config)
      draw(_params(), 0, _INDEX, _LABELS)
    return called

  def test_every_step_has_noise_of_its_own(self):
    called = self._called(_CONFIG)
    flat = np.stack([np.ravel(x) for x in (called["x"], *called["noises"])])
    self.assertLess(np.abs(np.corrcoef(flat) - np.eye(3)).max(), 0.5)

  @parameterized.parameters(
    ("ddim", "ddim5", [0, 20, 40, 60, 80]),
    ("dpm", "ddim5", [0, 20, 40, 60, 80]),
    ("ddpm", "5", [0, 25, 50, 74, 99]),
    ("dpm", "5", even_log_snr(_PROCESS, 5).timesteps.tolist()),
  )
  def test_visits_these_timesteps(self, method, steps, expected):
    config = _sampling(method=method, steps=steps)
    called = self._called(config)
    self.assertEqual(called["method"], method)
    self.assertEqual(called["process"].timesteps.tolist(), expected)

  def test_pixels_stay_in_range_latents_do_not_and_guidance_moves(self):
    self.assertLessEqual(np.abs(_draw()).max(), 1.0)
    self.assertGreater(np.abs(_draw(_LATENT)).max(), 1.0)
    plain = _draw(_sampling(cfg_scale=1.0))
    self.assertGreater(np.abs(_draw() - plain).max(), 1e-2)


class PaintTest(absltest.TestCase):
  def test_decoder_gets_unscaled_latents(self):
    got = []

    def decode(x):
      got.append(np.asarray(x))
      return jnp.ones((4, 8, 8, 3))

    paint = generation.make_image_sampler(_MODEL, _LATENT, decode)
    images = paint(_params(), 7, _INDEX, _LABELS)
    np.testing.assert_array_equal(images, np.full((4, 8, 8, 3), 255))
    np.testing.assert_allclose(
      (got[0] - 0.5) * 0.18215, _draw(_LATENT), rtol=1e-4, atol=1e-5
    )

  def test_latents_without_a_decoder_raise(self):
    with self.assertRaisesRegex(
      ValueError, r"diffusion\.space='latent'.*--vae PATH"
    ):
      generation.make_image_sampler(_MODEL, _LATENT)


class PixelsTest(absltest.TestCase):
  def test_every_level_comes_back_and_others_are_rounded_and_clipped(self):
    levels = np.array([*range(256), -300.0, -0.6, 0.4, 0.6, 254.6, 255.4, 900])
    images = jnp.asarray(levels / 127.5 - 1, jnp.float32)
    pixels = generation.to_pixels(images)
    chex.assert_type(pixels, jnp.uint8)
    expected = [*range(256), 0, 0, 0, 1, 255, 255, 255]
    np.testing.assert_array_equal(pixels, expected)

  def test_lays_out_row_by_row_with_white_between_and_at_the_end(self):
    # Images of one colour each: 10, 20, ...
    colours = 10 * np.arange(1, 6, dtype=np.uint8)
    images = np.broadcast_to(colours[:, None, None, None], (5, 2, 3, 1))
    grid, gap = generation.image_grid(images, columns=3), 2
    chex.assert_shape(grid, (2 * 2 + gap, 3 * 3 + 2 * gap, 1))
    expected = np.full(grid.shape, 255)
    for number in range(5):
      row, column = divmod(number, 3)
      top, left = row * (2 + gap), column * (3 + gap)
      expected[top : top + 2, left : left + 3] = 10 * (number + 1)
    np.testing.assert_array_equal(grid, expected)
    self.assertEqual(grid.dtype, np.uint8)


_TRAINING = make_process("linear", 1000)
_Z_SHAPE = (3, 2, 2, 1)
_KEY = jax.random.key(0)
_Z = jax.random.normal(jax.random.key(1), _Z_SHAPE)
_CLEAN = jax.random.normal(jax.random.key(2), _Z_SHAPE) / 2


def _noise(shape=_Z_SHAPE):
  return lambda step: jax.random.normal(jax.random.fold_in(_KEY, step), shape)


@functools.cache
def _network(denoise, prediction="epsilon", training=_TRAINING):
  """A network that knows the clean example, (x, signal, spread) -> x0."""
  log_snr = np.log(training.snr).astype(np.float32)
  timesteps = np.arange(len(training.timesteps), dtype=np.float32)

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
  x, path, last = np.asarray(_Z, np.float64), [], len(process.timesteps) - 1
  previous = None
  level = process.alphas_cumprod
  half_log_snr = np.log(level / (1 - level)) / 2
  for step in range(last, -1, -1):
    t = jnp.full(len(x), process.timesteps[step])
    out = np.asarray(predict(jnp.float32(x), t), np.float64)
    at, before = level[step], level[step - 1] if step else 1.0
    x0 = (x - np.sqrt(1 - at) * out) / np.sqrt(at)
    variance = (1 - before) / (1 - at) * (1 - at / before)
    if method == "ddim":  # arXiv:2010.02502, equation 12
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
    case=(("x0", "20"), ("v", "1"), ("v", "2")),
  )
  def test_returns_the_example(self, method, case):
    prediction, steps = case
    predict = _network(lambda x, signal, spread: _CLEAN, prediction)
    run = _sampler(predict, method, steps, prediction, noise=_noise())
    np.testing.assert_allclose(run(_Z), _CLEAN, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS, *FLOW_METHODS)
  def test_clips_the_example(self, method):
    predict, steps = _network(lambda x, signal, spread: 4 * _CLEAN), "5"
    if method in FLOW_METHODS:
      predict, steps = (lambda x, t: _Z - 4 * _CLEAN), "flow5"
    run = _sampler(predict, method, steps, noise=_noise(), clip=True)
    np.testing.assert_allclose(run(_Z), jnp.clip(4 * _CLEAN, -1, 1), atol=1e-4)


class StepsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("ddim", "5", 0.5), ("ddim", "5", 1.0),
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
_TWO_LABELS = jnp.array([3, 1])


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

  guided = samplers.guide(predict, _TWO_LABELS, _NO_LABEL, **options)
  return jax.jit(guided)(x, jnp.full(_B, step))


@functools.partial(jax.jit, static_argnames=("scale", "count"))
def _by_hand(x, step, scale, count):
  """Guided by two evaluations; only the first `count` channels."""
  t = jnp.full(_B, step)
  labelled = _predict(x, t, _TWO_LABELS)
  free = _predict(x, t, jnp.full(_B, _NO_LABEL))
  moved = free + scale * (labelled - free)
  return jnp.concatenate([moved[..., :count], labelled[..., count:]], -1)


class GuideTest(parameterized.TestCase):
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

  @parameterized.parameters(0, 1)
  def test_scales_0_and_1_are_one_evaluation(self, scale):
    x, batches = jax.random.normal(_KEY, (_B, 2, 3, 4)), []
    out = _guided(x, 2, batches, scale=scale)
    labels = _TWO_LABELS if scale else jnp.full(_B, _NO_LABEL)
    expected = _predict(x, jnp.full(_B, 2), labels)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    self.assertEqual(batches, [_B])
