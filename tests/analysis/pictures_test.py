"""Pictures that go into a page stay small."""

import io

import numpy as np
from absl.testing import absltest
from matplotlib.figure import Figure
from PIL import Image

from moh_jax.analysis import pictures


def _noise(inches):
  figure = Figure(figsize=(inches, inches))
  axis = figure.subplots()
  rng = np.random.default_rng(0)
  axis.imshow(rng.random((1000, 1000)), interpolation="nearest")
  return figure


class EncodeSmallTest(absltest.TestCase):
  def test_large_pictures_become_coarser(self):
    figure = _noise(9)
    whole = pictures.encode(figure, "png")
    self.assertGreater(len(whole), 400_000)
    self.assertLessEqual(len(pictures.encode_small(figure)), 400_000)

  def test_small_pictures_stay_as_they_are(self):
    figure = _noise(2)
    whole = Image.open(io.BytesIO(pictures.encode(figure, "png")))
    small = Image.open(io.BytesIO(pictures.encode_small(figure)))
    self.assertEqual(whole.size, small.size)

  def test_colours_are_as_many_as_heads(self):
    for count in (1, 8, 24):
      self.assertLen(set(pictures.head_colors(count)), count)


if __name__ == "__main__":
  absltest.main()
