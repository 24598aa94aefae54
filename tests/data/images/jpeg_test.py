"""simplejpeg against Pillow: the same pixels, and the same errors."""

import io
import itertools
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data import decode
from tests.data.images.photos import encode, photo

pytest.importorskip("simplejpeg")


def by_pillow(*args):
  with mock.patch.object(decode, "_simplejpeg", lambda: None):
    return decode.decode_image(*args)


class DecodersTest(parameterized.TestCase):
  @parameterized.product(
    mode=("RGB", "L"),
    channels=(1, 3),
    factor=(1, 2, 4, 8),
    options=({"subsampling": 0}, {"subsampling": 2}, {"progressive": True}),
  )
  def test_pixels_are_equal_at_every_scale(
    self, mode, channels, factor, options
  ):
    content = encode(photo(mode=mode), quality=92, **options)
    ours = decode.decode_image(content, channels, "x", factor)
    np.testing.assert_array_equal(
      ours, by_pillow(content, channels, "x", factor)
    )
    self.assertEqual(
      ours.shape, (-(-167 // factor), -(-251 // factor), channels)
    )
    used = decode.decode_jpeg(content, channels, factor)
    self.assertEqual(used is not None, mode == "L" or channels == 3)

  @parameterized.product(
    options=(
      {"subsampling": 0},
      {"subsampling": 1},
      {"subsampling": 2},
      {"subsampling": 2, "restart_marker_blocks": 3},
      {"progressive": True},
    ),
    mode=("RGB", "L"),
    factor=(1, 2, 8),
  )
  def test_upper_rows_are_those_of_all_pixels(self, options, mode, factor):
    content = encode(photo(mode=mode), quality=92, **options)
    whole = decode.decode_image(content, 3, "x", factor)
    fewer = "progressive" not in options
    for rows in (1, 15, 16, 17, 63, 64, 100, 160, 166, 167, 500):
      ours = decode.decode_image(content, 3, "x", factor, rows)
      np.testing.assert_array_equal(ours, whole[: len(ours)])
      self.assertGreaterEqual(len(ours), min(-(-rows // factor), len(whole)))
      if rows <= 100:
        self.assertEqual(len(ours) < len(whole), fewer)

  @parameterized.product(subsampling=(0, 1, 2), rows=(None, 64))
  def test_fast_repeats_the_colours_of_subsampled_files(
    self, subsampling, rows
  ):
    content = encode(photo(), quality=92, subsampling=subsampling)
    exact = decode.decode_image(content, 3, "x", 1, rows).astype(int)
    fast = decode.decode_image(content, 3, "x", 1, rows, fast=True)
    difference = np.abs(fast - exact[: len(fast)])
    if subsampling:
      self.assertBetween(difference.mean(), 0.01, 2)
    else:
      self.assertEqual(difference.max(), 0)
    # Brightness, which has all its pixels, stays.
    weights = (0.299, 0.587, 0.114)
    brightness = np.abs((fast - exact[: len(fast)]) @ weights)
    self.assertLess(brightness.mean(), 0.2)

  def test_truncation_below_the_upper_rows_is_found(self):
    content = encode(photo())
    with self.assertRaisesRegex(ValueError, "damaged or truncated"):
      decode.decode_image(content[: len(content) * 3 // 4], 3, "x.jpg", 1, 20)

  @parameterized.parameters(*range(1, 9))
  def test_turned_images_are_left_to_pillow(self, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    content = encode(photo(), exif=exif)
    self.assertIsNone(decode.decode_jpeg(content, 3))
    pixels = decode.decode_image(content, 3, "x")
    self.assertEqual(decode.describe_image(content, "x")[0], pixels.shape[:2])
    for factor in (2, 8):
      smaller = decode.decode_image(content, 3, "x", factor).shape[:2]
      self.assertEqual(
        smaller, tuple(-(-side // factor) for side in pixels.shape[:2])
      )

  def test_inks_are_left_to_pillow(self):
    content = encode(photo(mode="CMYK"))
    self.assertIsNone(decode.decode_jpeg(content, 3))
    self.assertEqual(decode.decode_image(content, 3, "x").shape, (167, 251, 3))

  def test_damage_gives_the_same_error_or_the_same_pixels(self):
    whole = encode(photo())
    rng = np.random.default_rng(0)
    cut = [whole[:length] for length in (3, 30, 400, 2000, len(whole) - 2)]
    altered = []
    for _ in range(40):
      content = bytearray(whole)
      content[rng.integers(len(whole))] = rng.integers(256)
      altered.append(bytes(content))
    cases = itertools.product([*cut, *altered], (1, 4), (None, 100))
    for content, factor, rows in cases:
      results = []
      for read in (decode.decode_image, by_pillow):
        try:
          pixels = read(content, 3, "x.jpg", factor, rows)
          results.append(pixels[: rows and -(-rows // factor)])
        except ValueError as error:
          results.append(str(error))
      self.assertIsInstance(results[0], type(results[1]))
      np.testing.assert_array_equal(*results)

  def test_too_many_pixels_are_refused(self):
    content = encode(photo())
    with mock.patch.object(decode, "_MOST_PIXELS", 1000):
      self.assertIsNone(decode.decode_jpeg(content, 3))

  def test_other_formats_are_no_jpeg(self):
    file = io.BytesIO()
    photo().save(file, "PNG")
    self.assertFalse(decode.is_jpeg(file.getvalue()))
    self.assertIsNone(decode.read_jpeg_header(file.getvalue()))


if __name__ == "__main__":
  absltest.main()
