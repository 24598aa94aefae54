"""Drawing from a diffusion model: noise by index, guidance, pixels, grids."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.models import generation
from tests.models import small

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
  def test_order_of_the_batch_does_not_matter(self):
    x, order = _draw(), [2, 0, 3, 1]
    chex.assert_shape(x, (4, 4, 4, 1))
    shuffled = _draw(index=_INDEX[order], labels=_LABELS[order])
    np.testing.assert_allclose(shuffled, x[order], atol=1e-5)
    self.assertGreater(np.abs(x[0] - x[2]).max(), 1e-2)

  def _called(self, config, **options) -> dict:
    """What the sampler is called with."""
    called = {}

    def sample(predict, x, process, **options):
      del predict
      called.update(options, x=x, process=process)
      called["noises"] = [options["noise"](step) for step in range(2)]
      return x

    with mock.patch.object(generation, "sample", sample):
      draw = generation.make_sampler(_MODEL, config, **options)
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
    # The strength takes the least noisy.
    *(("ddpm", "5", [0], 0.1), ("ddpm", "5", [0, 25], 0.5)),
    ("ddpm", "5", [0, 25, 50], 0.6),
  )
  def test_visits_these_timesteps(self, method, steps, expected, strength=1.0):
    config = _sampling(method=method, steps=steps)
    called = self._called(config, strength=strength)
    self.assertEqual(called["method"], method)
    self.assertEqual(called["process"].timesteps.tolist(), expected)

  def test_solver_has_even_distances_in_log_snr(self):
    called = self._called(_sampling(method="dpm", steps="5"))
    gaps = np.diff(np.log(called["process"].snr))
    np.testing.assert_allclose(gaps, gaps.mean(), rtol=1e-6)

  def test_pixels_stay_in_range_and_latents_do_not(self):
    self.assertLessEqual(np.abs(_draw()).max(), 1.0)
    self.assertGreater(np.abs(_draw(_LATENT)).max(), 1.0)


class GuidanceTest(parameterized.TestCase):
  def test_scale_moves_the_images_where_it_applies(self):
    plain = _draw(_sampling(cfg_scale=1.0))
    self.assertGreater(np.abs(_draw() - plain).max(), 1e-2)
    nowhere = _draw(_sampling(cfg_interval=(1, 2)))
    np.testing.assert_allclose(nowhere, plain, atol=1e-5)

  @parameterized.parameters(((0, 100), 0), ((0, 99), 1), ((1, 100), 1))
  def test_interval_of_all_steps_costs_no_conditional(self, interval, count):
    draw = generation.make_sampler(_MODEL, _sampling(cfg_interval=interval))
    program = str(jax.make_jaxpr(draw)(_params(), 0, _INDEX, _LABELS))
    self.assertEqual(program.count("cond["), count)

  @parameterized.parameters(((0, 100_000),), ((7, 100_000),), ((0, 10**6),))
  def test_interval_without_an_end_guides_the_first_step_of_a_flow(
    self, interval
  ):
    flow = {"schedule": "flow", "prediction": "velocity", "steps": 100_000}
    config = dataclasses.replace(
      _CONFIG,
      diffusion=config_lib.DiffusionConfig(space="pixel", **flow),
      sample=config_lib.SampleConfig(
        method="euler", steps="1", cfg_interval=interval
      ),
    )
    plain, guided = (_draw(_sampling(config, cfg_scale=w)) for w in (1.0, 3.0))
    self.assertGreater(np.abs(plain - guided).max(), 1e-3)


class PaintTest(absltest.TestCase):
  def _paint(self, config, decode=None):
    paint = generation.make_image_sampler(_MODEL, config, decode)
    return paint(_params(), 7, _INDEX, _LABELS)

  def test_pixels_of_the_drawn_images(self):
    images = self._paint(_CONFIG)
    chex.assert_type(images, jnp.uint8)
    expected = generation.to_pixels(_draw())
    np.testing.assert_allclose(
      np.int32(images), np.int32(expected), atol=1
    )  # a rounding apart at most

  def test_decoder_gets_unscaled_latents(self):
    got = []

    def decode(x):
      got.append(np.asarray(x))
      return jnp.ones((4, 8, 8, 3))

    images = self._paint(_LATENT, decode)
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
