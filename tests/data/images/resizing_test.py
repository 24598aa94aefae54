"""Resizing: torchvision's evaluation, the faster library, reduced decoding."""

import numpy as np
import pytest
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data import decode, transforms
from moh_jax.data.decode import LaterImage
from tests.data.images.photos import encode, photo

_NAMES = ("china", "flower")


def _torchvision(picture, shorter, size):
  """`Resize` and `CenterCrop` of torchvision 0.28 on a picture of Pillow.

  Sizes and offsets are computed as its functional_pil and functional do.
  """
  short, long = sorted(picture.size)
  longer = int(shorter * long / short)
  wide = picture.width > picture.height
  picture = picture.resize(
    (longer, shorter) if wide else (shorter, longer), Image.Resampling.BICUBIC
  )
  left = round((picture.width - size) / 2.0)
  top = round((picture.height - size) / 2.0)
  return np.asarray(picture.crop((left, top, left + size, top + size)))


def _difference(a, b):
  return np.abs(a.astype(int) - b.astype(int))


class EvaluationTest(parameterized.TestCase):
  @parameterized.product(
    name=_NAMES,
    size=((500, 375), (375, 500), (333, 500), (640, 427), (301, 299)),
    resize=((256, 224), (232, 224), (438, 384)),
    fast=(False, True),
  )
  def test_equals_torchvision_on_photographs(self, name, size, resize, fast):
    if fast:
      pytest.importorskip("cykooz_resizer")
    picture = photo(size, name=name)
    shorter, side = resize
    expected = _torchvision(picture, shorter, side)
    crop = transforms.ResizeCenterCrop(shorter, (side, side), fast)
    ours = crop.map({"image": np.asarray(picture)})["image"]
    difference = _difference(ours, expected)
    # Pillow rounds between its two passes, whose order depends on the box.
    self.assertLessEqual(difference.mean(), 0.25)
    self.assertLessEqual(difference.max(), 12)

  @parameterized.product(name=_NAMES, quality=(75, 90, 98), subsampling=(1, 2))
  def test_fast_is_torchvisions_within_a_level(
    self, name, quality, subsampling
  ):
    pytest.importorskip("cykooz_resizer")
    content = encode(
      photo((500, 375), name=name), quality=quality, subsampling=subsampling
    )
    image = LaterImage.of(content, 3, "x.jpg")
    crop = transforms.ResizeCenterCrop(256, (224, 224), fast=True)
    ours = crop.map({"image": image})["image"]
    exact = decode.decode_image(content, 3, "x")
    expected = _torchvision(Image.fromarray(exact), 256, 224)
    self.assertLess(_difference(ours, expected).mean(), 1)


class FastTest(parameterized.TestCase):
  @parameterized.product(
    channels=(1, 3),
    box=(None, (0, 0, 300, 200), (40.5, 30.25, 190, 180), (290, 190, 300, 200)),
    size=((64, 64), (200, 300), (224, 100)),
  )
  def test_is_pillows_within_a_few_levels(self, channels, box, size):
    pytest.importorskip("cykooz_resizer")
    picture = photo((300, 200), "L" if channels == 1 else "RGB")
    image = np.asarray(picture).reshape(200, 300, channels)
    ours = decode.resize(image, size, box, fast=True)
    difference = _difference(ours, decode.resize(image, size, box))
    self.assertEqual(ours.shape, (*size, channels))
    self.assertLess(difference.mean(), 0.5)
    self.assertLessEqual(difference.max(), 8)


def _later(size, **options):
  picture = photo(size)
  content = encode(picture, quality=95, **options)
  return LaterImage.of(content, 3, "x.jpg")


class UpperRowsTest(parameterized.TestCase):
  @parameterized.product(
    box=((0, 0, 300, 70), (40.5, 30.25, 190, 100), (290, 180, 300, 199)),
    size=((64, 64), (200, 300), (20, 30)),
    fast=(False, True),
    subsampling=(0, 2),
  )
  def test_crop_is_that_of_all_pixels(self, box, size, fast, subsampling):
    if fast:
      pytest.importorskip("cykooz_resizer")
    later = _later((300, 200), subsampling=subsampling)
    whole = decode.decode_image(later.content, 3, "x", fast=fast)
    np.testing.assert_array_equal(
      decode.resize(later, size, box, fast=fast),
      decode.resize(whole, size, box, fast=fast),
    )

  def test_rows_below_the_crop_are_not_decoded(self):
    pytest.importorskip("simplejpeg")
    pixels, _ = _later((300, 200)).region((50, 50), (0, 0, 60, 60))
    self.assertBetween(len(pixels), 62, 80)


class ReducedTest(parameterized.TestCase):
  @parameterized.parameters(
    ((0, 0, 800, 600), 32, 8),
    ((0, 0, 800, 600), 50, 4),
    ((0, 0, 800, 600), 100, 2),
    ((0, 0, 800, 600), 160, 1),
    ((10, 20, 410, 270), 32, 2),
    ((10, 20, 74, 84), 32, 1),
  )
  def test_scale_follows_from_the_crop(self, box, side, factor):
    later = _later((800, 600))
    pixels, inside = later.region((side, side), box, reduced=True)
    self.assertEqual(pixels.shape[1], 800 // factor)
    self.assertBetween(pixels.shape[0], box[3] / factor, 600 // factor)
    self.assertEqual(inside, tuple(edge / factor for edge in box))
    self.assertEqual(later.region((side, side), box)[0].shape[1], 800)

  @parameterized.product(
    size=((1001, 777), (640, 960)),
    box=((0, 0, 640, 777), (30, 40, 600, 700), (100, 0, 640, 530)),
    side=(32, 60),
  )
  def test_crop_is_about_that_of_all_pixels(self, size, box, side):
    later = _later(size)
    box = tuple(min(edge, size[i % 2]) for i, edge in enumerate(box))
    expected = decode.resize(later, (side, side), box)
    ours = decode.resize(later, (side, side), box, reduced=True)
    self.assertLess(_difference(ours, expected).mean(), 1)

  def test_damage_is_named(self):
    later = _later((800, 600))
    cut = later.content[:5000]
    with self.assertRaisesRegex(ValueError, "^x.jpg: damaged or truncated"):
      LaterImage.of(cut, 3, "x.jpg").region((32, 32), (0, 0, 800, 600))


if __name__ == "__main__":
  absltest.main()
