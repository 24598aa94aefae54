"""Pixels that are normalized on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.config import DataConfig, TextDataConfig
from moh_jax.config.data import RandAugmentPolicy
from moh_jax.config.dit import LatentScaling
from moh_jax.data import augment, image_shards, transforms
from moh_jax.data.transforms import Normalize, normalizer
from tests.data import tiny_sets

_MODEL = dataclasses.replace(tiny_sets.VIT, image_size=(8, 8))


def _image(shape, seed=0):
  return np.random.RandomState(seed).randint(0, 256, shape, np.uint8)


class ResizeCenterCropTest(parameterized.TestCase):
  @parameterized.parameters(
    ((8, 16), (8, 16)), ((16, 32), (8, 16)), ((16, 16), (8, 16)),
    ((32, 16), (16, 8)), ((9, 30), (8, 16)), ((10, 10), (20, 20)),
  )  # fmt: skip
  def test_other_aspects_lose_no_more_than_they_must(self, shape, size):
    rows, columns = np.indices(shape)
    ramps = np.stack([rows, columns, rows], -1).astype(np.uint8) * 7
    crop = transforms.ResizeCenterCrop(min(size), size)
    out = crop.map({"image": ramps})["image"]
    scale = max(np.array(size) / shape)
    whole = transforms.resize(
      ramps, tuple(max(int(n * scale), w) for n, w in zip(shape, size))
    )
    top, left = (
      round((n - w) / 2) for n, w in zip(whole.shape[:2], size, strict=True)
    )
    expected = whole[top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(out, expected.astype(int), atol=3)


def _adm(image, size):
  """ADM's rule in Pillow's own terms: widths first."""
  picture = Image.fromarray(image)
  while min(picture.size) >= 2 * size:
    picture = picture.resize(
      (picture.width // 2, picture.height // 2), Image.Resampling.BOX
    )
  scale = size / min(picture.size)
  picture = picture.resize(
    (round(picture.width * scale), round(picture.height * scale)),
    Image.Resampling.BICUBIC,
  )
  left, top = (picture.width - size) // 2, (picture.height - size) // 2
  return np.asarray(picture)[top : top + size, left : left + size]


class CenterCropTest(parameterized.TestCase):
  @parameterized.product(
    shape=((8, 8), (9, 17), (31, 16), (64, 50), (33, 130), (5, 6)),
    size=(7, 8),
  )
  def test_equals_the_public_rule(self, shape, size):
    image = _image((*shape, 3))
    out = transforms.center_crop(image, (size, size))
    np.testing.assert_array_equal(out, _adm(image, size))


class RandomShiftTest(absltest.TestCase):
  def test_result_is_the_image_moved_by_at_most_an_eighth(self):
    image = _image((16, 8, 1)) // 2 + 1  # no zero, so that padding shows
    padded = np.pad(image, ((2, 2), (1, 1), (0, 0)))
    windows = {
      padded[top : top + 16, left : left + 8].tobytes(): (top, left)
      for top in range(5)
      for left in range(3)
    }
    shift, seen = transforms.RandomShift(), set()
    for rng in map(np.random.default_rng, range(150)):
      moved = shift.random_map({"image": image}, rng)["image"]
      seen.add(windows[moved.tobytes()])
    self.assertEqual(seen, set(windows.values()))


class ChoiceTest(parameterized.TestCase):
  def test_further_changes_follow_crop_and_flip_in_timms_order(self):
    data = DataConfig(
      augment="crop_flip",
      auto_augment="rand-m9-mstd0.5-inc1",
      color_jitter=0.3,
      random_erasing=0.25,
      mean=(0.485, 0.456, 0.406),
      std=(0.229, 0.224, 0.225),
    )
    policy = RandAugmentPolicy(magnitude=9, spread=0.5, increasing=True)
    self.assertEqual(
      transforms.train_transforms(data, _MODEL),
      [
        transforms.RandomCropFlip((8, 8)),
        augment.RandAugment(policy, (124, 116, 104)),
        augment.ColorJitter(0.3),
        augment.RandomErasing(0.25, data.mean, data.std),
      ],
    )


class PixelsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.5,) * 3, (0.5,) * 3),
    ((0.3,), (0.37,)),
  )
  def test_all_values_are_those_of_numpy_up_to_rounding(self, mean, std):
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    image = np.repeat(image, len(mean), axis=-1)
    expected = Normalize(mean, std).map({"image": image[0]})["image"]
    ours = normalizer(DataConfig(mean=mean, std=std))({"image": image})
    self.assertEqual(ours["image"].dtype, jnp.float32)
    np.testing.assert_allclose(ours["image"][0], expected, rtol=0, atol=1.3e-6)

  def test_other_batches_stay_as_they_are(self):
    latents = {"image": jnp.ones((1, 2, 2, 4)), "label": jnp.ones(1)}
    text = {"tokens": jnp.ones((1, 4), jnp.int32)}
    data = DataConfig(mean=(0.5,) * 4, std=(0.5,) * 4)
    for config in (data, DataConfig()):
      ours = normalizer(config)(latents)
      jax.tree.map(np.testing.assert_array_equal, ours, latents)
    self.assertIs(normalizer(TextDataConfig())(text), text)


class LatentsTest(parameterized.TestCase):
  def test_samples_have_the_posteriors_mean_and_variance(self):
    element = {"image": tiny_sets.moments(3).astype(np.float16), "label": 1}
    transform = transforms.SampleLatent(LatentScaling(0.5))
    rngs = map(np.random.default_rng, range(2000))
    samples = [transform.random_map(element, r)["image"] for r in rngs]
    samples = np.stack(samples)
    noise = samples - np.sign(samples) * 30 * 0.5
    std = 0.5 * np.exp(-2)
    self.assertEqual(samples.dtype, np.float32)
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 * std / 2000**0.5)
    np.testing.assert_allclose(noise.std(0), std, rtol=0.1)
    self.assertAlmostEqual(noise.std(), std, delta=0.01 * std)

  def test_shift_and_statistics_of_channels(self):
    moments = np.zeros((2, 2, 1, 1, 2), np.float16)
    moments[0, 0] = (5.0, -1.0)
    scaling = LatentScaling(0.5, shift=0.25, mean=(1.0, 2.0), std=(2.0, 4.0))
    out = transforms.MeanLatent(scaling).map({"image": moments, "label": 0})
    # ((5 - 1) / 2 - 0.25) * 0.5 and ((-1 - 2) / 4 - 0.25) * 0.5.
    np.testing.assert_allclose(out["image"][0, 0], (0.875, -0.5))

  @parameterized.parameters(np.inf, np.nan, 1e6)
  def test_what_float16_cannot_hold_is_refused(self, value):
    moments = tiny_sets.moments(0)
    moments[0, 0, 1, 2, 0] = value
    with self.assertRaisesRegex(ValueError, "not finite in float16"):
      image_shards.encode_moments(moments)
