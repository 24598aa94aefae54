"""Pixels that are normalized on the device."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from PIL import Image
from scipy import stats

from moh_jax.config import DataConfig, TextDataConfig
from moh_jax.config.dit import LatentScaling
from moh_jax.data import packed, transforms
from moh_jax.data.decode import to_array, to_picture
from moh_jax.data.transforms import OPERATIONS, normalizer
from tests.data import tiny_sets

_MODEL = dataclasses.replace(tiny_sets.VIT, image_size=(8, 8))


def _image(shape, seed=0):
  return np.random.RandomState(seed).randint(0, 256, shape, np.uint8)


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
    shape=((8, 8), (9, 17), (31, 16), (64, 50), (33, 130), (5, 6)), size=(7, 8)
  )
  def test_equals_the_public_rule(self, shape, size):
    image = _image((*shape, 3))
    out = transforms.center_crop(image, (size, size))
    np.testing.assert_array_equal(out, _adm(image, size))


class PixelsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.5,) * 3, (0.5,) * 3),
    ((0.3,), (0.37,)),
  )
  def test_all_values_are_those_of_numpy_up_to_rounding(self, mean, std):
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    image = np.repeat(image, len(mean), axis=-1)
    expected = (image[0] / np.float32(255) - np.float32(mean)) / np.float32(std)
    ours = normalizer(DataConfig(mean=mean, std=std))({"image": image})
    self.assertEqual(ours["image"].dtype, jnp.float32)
    np.testing.assert_allclose(ours["image"][0], expected, rtol=0, atol=1.3e-6)

  def test_other_batches_stay_as_they_are(self):
    latents = {"image": jnp.ones((1, 2, 2, 4)), "label": jnp.ones(1)}
    for data in (DataConfig(mean=(0.5,) * 4, std=(0.5,) * 4), DataConfig()):
      ours = normalizer(data)(latents)
      jax.tree.map(np.testing.assert_array_equal, ours, latents)
    self.assertIs(normalizer(TextDataConfig())(latents), latents)


class LatentsTest(parameterized.TestCase):
  def test_shift_and_statistics_of_channels(self):
    moments = np.zeros((2, 2, 1, 1, 2), np.float16)
    moments[0, 0] = (5.0, -1.0)
    scaling = LatentScaling(0.5, shift=0.25, mean=(1.0, 2.0), std=(2.0, 4.0))
    out = transforms.mean_latent(moments, scaling)
    # ((5 - 1) / 2 - 0.25) * 0.5 and ((-1 - 2) / 4 - 0.25) * 0.5.
    np.testing.assert_allclose(out[0, 0], (0.875, -0.5))

  @parameterized.parameters(np.inf, np.nan, 1e6)
  def test_what_float16_cannot_hold_is_refused(self, value):
    moments = tiny_sets.moments(0)
    moments[0, 0, 1, 2, 0] = value
    with self.assertRaisesRegex(ValueError, "not finite in float16"):
      packed.encode_moments(moments)


_LEVEL = 1e-6  # of significance: how often a right sampler would fail


class RandomErasingTest(parameterized.TestCase):
  def _boxes(self, count, shape=(48, 64)):
    """[count, 2]: rows and columns of the boxes, 0 where none is."""
    how = {"probability": 0.25, "mean": (1.0,), "std": (1e-9,)}  # to white
    rng, found = np.random.default_rng(0), []
    image = np.zeros((*shape, 1), np.uint8)
    for _ in range(count):
      erased = transforms.random_erasing(image, rng, **how)[..., 0] > 0
      found.append((erased.any(1).sum(), erased.any(0).sum()))
      self.assertEqual(erased.sum(), math.prod(found[-1]))  # one whole box
    return np.array(found)

  def test_probability_area_and_aspect_are_timms(self):
    with np.load(FILE) as file:
      timm = file["erased"].astype(int)
    ours = self._boxes(10_000)
    share = np.mean(ours[:, 0] > 0)
    test = stats.binomtest(int(np.sum(ours[:, 0] > 0)), len(ours), 0.25)
    self.assertGreater(test.pvalue, _LEVEL, share)
    ours, timm = (boxes[boxes[:, 0] > 0] for boxes in (ours, timm))
    for measure in (lambda b: b[:, 0] * b[:, 1], lambda b: b[:, 0] / b[:, 1]):
      test = stats.ks_2samp(measure(ours), measure(timm))
      self.assertGreater(test.pvalue, _LEVEL)
    area = ours[:, 0] * ours[:, 1] / (48 * 64)
    # Sides are rounded, so the area is not exactly in its range.
    self.assertBetween(area.min(), 0.015, 0.03)
    self.assertBetween(area.max(), 0.3, 0.345)


FILE = pathlib.Path(__file__).parents[1] / "goldens" / "timm_1.0.31.npz"
_FILLS = {"rgb": (124, 116, 104), "grey": 77}


def recorded(mode):
  """The photograph [X, Y, channels], and timm's results by case."""
  with np.load(FILE) as file:
    suffix = "" if mode == "rgb" else "_grey"
    photograph = file[f"photograph{suffix}"].reshape(24, 32, -1)
    images, places = file[f"images_{mode}"], file[f"places_{mode}"]
    names = file[f"names_{mode}"].tolist()
  made = {
    name.partition("/")[0]: images[place].reshape(photograph.shape)
    for name, place in zip(names, places, strict=True)
  }
  return photograph, made


class OperationsTest(parameterized.TestCase):
  @parameterized.parameters("rgb", "grey")
  def test_pixels_are_timms_at_every_level_and_sign(self, mode):
    photograph, made = recorded(mode)
    seen = set()
    for case, expected in made.items():
      sign = "+" if "+" in case else "-"
      name, _, magnitude = case.partition(sign)
      if name not in OPERATIONS:
        continue
      operation = OPERATIONS[name]
      level = int(magnitude) / 10
      if operation.signed and sign == "-":
        level = -level
      picture = operation.apply(to_picture(photograph), level, _FILLS[mode])
      np.testing.assert_array_equal(to_array(picture), expected, err_msg=case)
      seen.add((name, sign, magnitude))
    self.assertLen(seen, len(OPERATIONS) * 2 * 4)
