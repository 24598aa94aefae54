"""Rows that slide, against Pillow's own transform."""

from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data.augment import slide_rows
from tests.data.images.photos import photo

_FILLS = {"RGB": (124, 116, 104), "L": 77}


def _pillow(picture, slope, offset):
  return picture.transform(
    picture.size,
    Image.Transform.AFFINE,
    (1, slope, offset, 0, 1, 0),
    resample=Image.Resampling.BICUBIC,
    fillcolor=_FILLS[picture.mode],
  )


class SlideRowsTest(parameterized.TestCase):
  @parameterized.product(
    mode=("RGB", "L"),
    size=((97, 64), (40, 90), (1, 7), (5, 1)),
    slope=(0.0, 0.3, -0.27, 0.123456789, -1.7),
    offset=(0, 3.0, -41.4, 25.6543, 200.5),
  )
  def test_pixels_are_pillows(self, mode, size, slope, offset):
    picture = photo(size, mode)
    ours = slide_rows(picture, slope, offset, _FILLS[mode])
    self.assertEqual((ours.mode, ours.size), (mode, size))
    np.testing.assert_array_equal(ours, _pillow(picture, slope, offset))

  def test_random_slopes_of_noise(self):
    rng = np.random.default_rng(0)
    for _ in range(30):
      noise = rng.integers(0, 256, (60, 70, 3), np.uint8)
      picture = Image.fromarray(noise)
      slope, offset = rng.normal(0, 0.3), rng.normal(0, 30)
      ours = slide_rows(picture, slope, offset, _FILLS["RGB"])
      np.testing.assert_array_equal(ours, _pillow(picture, slope, offset))

  def test_places_that_round_to_both_sides_are_left_to_pillow(self):
    # Column + 0.5 + offset is below a whole number, and rounded to one where
    # numbers are large.
    picture, offset = photo((97, 64)), 1 - 1e-15
    with mock.patch.object(
      Image.Image, "transform", autospec=True, side_effect=Image.Image.transform
    ) as transform:
      ours = slide_rows(picture, 0.0, offset, _FILLS["RGB"])
    transform.assert_called_once()
    np.testing.assert_array_equal(ours, _pillow(picture, 0.0, offset))


if __name__ == "__main__":
  absltest.main()
