"""Sampling: which image an index is."""

import functools
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.inference import sample as sample_lib
from moh_jax.inference.restore import Restored
from moh_jax.models.registry import make_model
from tests.inference import tiny_sampler
from tests.training import tiny

_SIZE = 8
_STARTS = (0, 8, 16, 24)


@functools.cache
def _images():
  return np.concatenate(
    [tiny_sampler.sampler().batch(start, _SIZE) for start in _STARTS]
  )


class SamplerTest(parameterized.TestCase):
  @parameterized.parameters(3, 16)
  def test_images_do_not_depend_on_the_batch_size(self, size):
    images = tiny_sampler.sampler().batch(5, size)
    np.testing.assert_array_equal(images, _images()[5 : 5 + size])

  @parameterized.parameters(3, 8)
  def test_images_are_the_same_on_eight_devices(self, size):
    images = tiny_sampler.sampler(devices=8).batch(5, size)
    np.testing.assert_array_equal(images, _images()[5 : 5 + size])

  def test_images_are_pixels_and_differ(self):
    images = _images()
    self.assertEqual(images.shape, (32, 8, 8, 1))
    self.assertEqual(images.dtype, np.uint8)
    self.assertLen({image.tobytes() for image in images}, 32)

  def test_labels_are_those_of_all_classes_in_turn(self):
    labels = tiny_sampler.sampler().label(np.arange(23))
    np.testing.assert_array_equal(labels, np.arange(23) % 10)
    self.assertEqual(labels.dtype, np.int32)

  def test_wanted_labels_repeat(self):
    labels = tiny_sampler.sampler(labels=(3, 3, 7)).label(np.arange(7))
    np.testing.assert_array_equal(labels, [3, 3, 7, 3, 3, 7, 3])

  def test_label_and_seed_change_an_image_and_nothing_else_does(self):
    # Image 3 has label 3 with these labels as with all in turn.
    same = tiny_sampler.sampler(labels=(5, 6, 7, 3)).batch(0, _SIZE)
    np.testing.assert_array_equal(same[3], _images()[3])
    self.assertFalse(np.array_equal(same[0], _images()[0]))
    other = tiny_sampler.sampler(seed=2**31 - 1).batch(0, _SIZE)
    for ours, theirs in zip(other, _images()):
      self.assertFalse(np.array_equal(ours, theirs))

  def test_no_label_is_scale_0(self):
    none = tiny_sampler.sampler(labels=(None,)).batch(0, 2)
    self.assertFalse(np.array_equal(none, _images()[:2]))
    restored = tiny_sampler.restored(cfg_scale=0.0)
    free = sample_lib.Sampler(
      restored, labels=(4,), mesh=tiny_sampler.mesh(1)
    ).batch(0, 2)
    np.testing.assert_array_equal(free, none)

  def test_own_noise_is_what_images_begin_with(self):
    rows = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
    sampler = sample_lib.Sampler(
      tiny_sampler.restored(method="ddim"),
      labels=(3,),
      mesh=tiny_sampler.mesh(1),
      noise=rows,
    )
    images = sampler.batch(0, 4)
    np.testing.assert_array_equal(images[:2], images[2:])
    self.assertFalse(np.array_equal(images[0], images[1]))

  def test_start_images_are_kept_the_more_the_less_the_strength(self):
    start = np.tanh(np.random.default_rng(0).normal(size=(1, 8, 8, 1)))
    pixels = (start + 1) * 127.5

    def distance(strength):
      sampler = sample_lib.Sampler(
        tiny_sampler.restored(steps="50"),
        mesh=tiny_sampler.mesh(1),
        labels=(3,),
        start=start,
        strength=strength,
      )
      return np.abs(sampler.batch(0, 1) - pixels).mean()

    self.assertLess(distance(0.02), 20)
    self.assertLess(distance(0.02), distance(1.0))

  @parameterized.parameters(
    ({"noise": np.zeros((8, 8, 1))}, r"noise of shape \(8, 8, 1\) must be"),
    ({"start": np.zeros((0, 8, 8, 1))}, "start of shape .* n at least 1"),
    ({"strength": 0.5}, "strength=0.5 is of `start`"),
    ({"start": np.zeros((1, 8, 8, 1)), "strength": 0.0}, "strength=0.0 must"),
  )
  def test_wrong_beginnings_are_named(self, options, text):
    with self.assertRaisesRegex(ValueError, text):
      sample_lib.Sampler(
        tiny_sampler.restored(), mesh=tiny_sampler.mesh(1), **options
      )

  @parameterized.parameters(1, 5, 8, 13)
  def test_few_images_come_in_full_batches(self, num):
    with mock.patch.object(
      sample_lib.Sampler, "batch", autospec=True,
      side_effect=sample_lib.Sampler.batch,
    ) as batch:  # fmt: skip
      images = sample_lib.sample_images(tiny_sampler.sampler(), num, _SIZE)
    np.testing.assert_array_equal(images, _images()[:num])
    self.assertEqual({call.args[2] for call in batch.call_args_list}, {_SIZE})

  @parameterized.parameters(
    ({"labels": (3, 10)}, r"label 10 must be in \[0, 9\]"),
    ({"labels": (-1,)}, r"label -1 must be in \[0, 9\]"),
    ({"seed": -1}, r"seed=-1 must be in \[0, 2147483647\]"),
    ({"seed": 2**31}, "seed=2147483648 must be in"),
  )
  def test_bad_labels_and_seeds_are_named(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      sample_lib.Sampler(
        tiny_sampler.restored(), mesh=tiny_sampler.mesh(1), **options
      )

  def test_model_that_does_not_draw_is_refused(self):
    config = tiny.config()
    restored = Restored(config, make_model(config)[0], {}, 0, ())
    with self.assertRaisesRegex(
      ValueError, r"family 'vit'; `sample` needs 'dit'"
    ):
      sample_lib.Sampler(restored, mesh=tiny_sampler.mesh(1))

  def test_latents_need_their_autoencoder(self):
    config = tiny.dit_config(
      data={"source": "fake"}, diffusion={"space": "latent"}
    )
    restored = Restored(config, make_model(config)[0], {}, 0, ())
    with self.assertRaisesRegex(ValueError, "--vae PATH"):
      sample_lib.Sampler(restored, mesh=tiny_sampler.mesh(1))


if __name__ == "__main__":
  absltest.main()
