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
from moh_jax.config.dit import DIFFUSION_METHODS, FLOW_METHODS
from moh_jax.models import diffusion, generation, samplers
from moh_jax.models.diffusion import (
  even_log_snr,
  even_times,
  make_process,
  q_sample,
  respace,
  training_target,
)
from tests.models import small

_PROCESS = make_process("linear", 100)
_STEPS = [1, 5, 40, 99]
_T = jnp.array(_STEPS)
_SHAPE = (len(_STEPS), 3, 2, 2)


def _normal(seed: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), _SHAPE)


_X0, _NOISE = _normal(0) / 2, _normal(1)
_X = q_sample(_PROCESS, _X0, _T, _NOISE)


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

  def test_targets_are_those_of_the_formula(self):
    level = _PROCESS.alphas_cumprod[np.array(_STEPS)].reshape(-1, 1, 1, 1)
    velocity = np.sqrt(level) * _NOISE - np.sqrt(1 - level) * _X0
    for name, want in (("epsilon", _NOISE), ("x0", _X0), ("v", velocity)):
      target = training_target(_PROCESS, name, _X0, _T, _NOISE)
      np.testing.assert_allclose(target, want, atol=1e-6)

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
    log_snr = process.log_snr
    chex.assert_shape(log_snr, (steps,))
    ends = np.maximum(whole.log_snr[[0, -1]], -10.2)  # then only noise
    np.testing.assert_allclose(log_snr[[0, -1]], ends, rtol=1e-6)
    gaps = np.diff(log_snr)
    np.testing.assert_allclose(gaps, gaps.mean(), rtol=1e-6)
    # The network is told the times at which the process has these levels.
    self.assertEqual(process.timesteps.dtype, np.float32)
    there = np.interp(process.timesteps, whole.timesteps, whole.log_snr)
    np.testing.assert_allclose(there, log_snr, atol=1e-4)


class LossTest(absltest.TestCase):
  """Values and gradients are recorded, see tests/parity."""

  def test_the_impossible_costs_a_bounded_amount(self):
    @jax.jit
    def bound(out):
      first = jnp.zeros(len(_STEPS), jnp.int32)
      return diffusion.variational_bound(_PROCESS, "x0", out, _X0, _X, first)

    wrong = jnp.concatenate([_X0 + 1.5, 0 * _X0], axis=-1)
    self.assertLessEqual(bound(wrong).max(), -math.log2(1e-12) + 1e-3)
    chex.assert_tree_all_finite(
      jax.jit(jax.grad(lambda x: bound(x).sum()))(wrong)
    )


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


_MODEL = small.network(_CONFIG.model)


def _run(sampler) -> np.ndarray:
  params = small.random_variables(_CONFIG.model)["params"]
  return np.asarray(sampler(params, 7, _INDEX, _LABELS))


@functools.cache
def _draw(config=_CONFIG) -> np.ndarray:
  return _run(jax.jit(generation.make_sampler(_MODEL, config)))


def _called(config):
  """What the sampler is called with."""
  spy = mock.Mock(side_effect=lambda predict, x, process, **options: x)
  with mock.patch.object(generation, "sample", spy):
    _run(generation.make_sampler(_MODEL, config))
  return spy.call_args


class DrawTest(parameterized.TestCase):
  def test_every_step_has_noise_of_its_own(self):
    (_, x, _), options = _called(_CONFIG)
    noises = (x, *map(options["noise"], range(2)))
    flat = np.stack([np.ravel(noise) for noise in noises])
    self.assertLess(np.abs(np.corrcoef(flat) - np.eye(3)).max(), 0.5)

  @parameterized.parameters(
    ("dpm", "ddim5", [0, 20, 40, 60, 80]),
    ("ddpm", "5", [0, 25, 50, 74, 99]),
    ("dpm", "5", even_log_snr(_PROCESS, 5).timesteps.tolist()),
  )
  def test_visits_these_timesteps(self, method, steps, expected):
    config = config_lib.apply_overrides(
      _CONFIG, "sample", method=method, steps=steps
    )
    (_, _, process), options = _called(config)
    self.assertEqual(options["method"], method)
    self.assertEqual(process.timesteps.tolist(), expected)

  def test_pixels_stay_in_range_latents_do_not_and_guidance_moves(self):
    self.assertLessEqual(np.abs(_draw()).max(), 1.0)
    self.assertGreater(np.abs(_draw(_LATENT)).max(), 1.0)
    plain = _draw(config_lib.apply_overrides(_CONFIG, "sample", cfg_scale=1.0))
    self.assertGreater(np.abs(_draw() - plain).max(), 1e-2)


class PaintTest(absltest.TestCase):
  def test_decoder_gets_unscaled_latents(self):
    got = []

    def decode(x):
      got.append(np.asarray(x))
      return jnp.ones((4, 8, 8, 3))

    paint = generation.make_image_sampler(_MODEL, _LATENT, decode)
    np.testing.assert_array_equal(_run(paint), np.full((4, 8, 8, 3), 255))
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


_TRAINING = make_process("linear", 1000)
_Z_SHAPE = (3, 2, 2, 1)
_KEY = jax.random.key(0)
_Z = jax.random.normal(jax.random.key(1), _Z_SHAPE)
_CLEAN = jax.random.normal(jax.random.key(2), _Z_SHAPE) / 2


def _noise(shape=_Z_SHAPE):
  return lambda step: jax.random.normal(jax.random.fold_in(_KEY, step), shape)


@functools.cache
def _network(denoise, prediction="epsilon"):
  """A network that knows the clean example, (x, signal, spread) -> x0."""
  log_snr = _TRAINING.log_snr.astype(np.float32)

  def predict(x, t):
    value = jnp.interp(t.astype(jnp.float32), jnp.arange(1000.0), log_snr)
    value = value.reshape(-1, *[1] * (x.ndim - 1))
    signal, spread = (jnp.sqrt(jax.nn.sigmoid(s)) for s in (value, -value))
    x0 = denoise(x, signal, spread)
    noise = (x - signal * x0) / spread
    velocity = signal * noise - spread * x0
    return {"epsilon": noise, "x0": x0, "v": velocity}[prediction]

  return predict


def _tanh(x, signal, spread):
  """A clean example that is no linear function of x."""
  del spread
  return jnp.tanh(signal * x)


def _velocity(x, t):
  return jnp.sin(x) - jnp.reshape(t / 1000, (-1, 1, 1, 1))


def _process(spacing):
  """Steps of the training process; "evenN" at even log-SNR, "flowN" a flow."""
  if spacing.startswith("flow"):
    return even_times(int(spacing.removeprefix("flow")), 1000)
  if spacing.startswith("even"):
    return even_log_snr(_TRAINING, int(spacing.removeprefix("even")))
  return respace(_TRAINING, spacing)


def _sample(predict, method, spacing, **options):
  call = functools.partial(samplers.sample, predict, method=method, **options)
  return jax.jit(functools.partial(call, process=_process(spacing)))(_Z)


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
    method=DIFFUSION_METHODS, case=(("x0", "20"), ("v", "1"), ("v", "2"))
  )
  def test_returns_the_example(self, method, case):
    prediction, steps = case
    predict = _network(lambda x, signal, spread: _CLEAN, prediction)
    options = {"prediction": prediction, "noise": _noise()}
    out = _sample(predict, method, steps, **options)
    np.testing.assert_allclose(out, _CLEAN, atol=1e-4)

  @parameterized.parameters(*DIFFUSION_METHODS, *FLOW_METHODS)
  def test_clips_the_example(self, method):
    predict, steps = _network(lambda x, signal, spread: 4 * _CLEAN), "5"
    if method in FLOW_METHODS:
      predict, steps = (lambda x, t: _Z - 4 * _CLEAN), "flow5"
    out = _sample(predict, method, steps, noise=_noise(), clip=True)
    np.testing.assert_allclose(out, jnp.clip(4 * _CLEAN, -1, 1), atol=1e-4)


class StepsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("ddim", "5", 0.5), ("ddim", "5", 1.0),
    # Of equal steps in log-SNR, and of others whose history is bounded.
    ("dpm", "even6"), ("dpm", "ddim8"),
  )  # fmt: skip
  def test_trajectory_is_that_of_the_papers(self, method, spacing, eta=0.0):
    predict, process = _network(_tanh), _process(spacing)
    options = {"noise": _noise(), "eta": eta, "trajectory": True}
    out = _sample(predict, method, spacing, **options)
    path = _written_out(method, predict, process, _noise(), eta)
    np.testing.assert_allclose(out, path, rtol=2e-4, atol=2e-4)

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
    out = _sample(_velocity, method, spacing, trajectory=True)
    np.testing.assert_allclose(out, path, rtol=2e-4, atol=2e-4)


def _predict(x, t, labels):
  """Depends on every input; the last channel tells an example's label."""
  number, time = (
    y.astype(jnp.float32)[:, None, None, None] for y in (labels, t)
  )
  return jnp.concatenate(
    [x + number * x**2 + time, 0 * x[..., :1] + number], axis=-1
  )


class GuideTest(parameterized.TestCase):
  @parameterized.parameters(
    (2.5, "three", 4, 3), (2.5, "all", 4, 4), (2.5, "three", 2, 2),
    (0, "three", 4, 5), (1, "all", 4, 5),  # one evaluation
  )  # fmt: skip
  def test_moves_these_channels_and_no_other(
    self, scale, channels, size, count
  ):
    x, t = jax.random.normal(_KEY, (2, 2, 3, size)), jnp.full(2, 7)
    labels, none = jnp.array([3, 1]), jnp.full(2, 5)
    predict = mock.Mock(side_effect=_predict)
    how = {"scale": scale, "channels": channels}
    out = samplers.guide(predict, labels, 5, **how)(x, t)
    labelled, free = _predict(x, t, labels), _predict(x, t, none)
    moved = free + scale * (labelled - free)
    # The variance, after the prediction, is the labelled one.
    expected = jnp.where(jnp.arange(size + 1) < count, moved, labelled)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    batches = [len(call.args[0]) for call in predict.call_args_list]
    self.assertEqual(batches, [2 if scale in (0, 1) else 4])
