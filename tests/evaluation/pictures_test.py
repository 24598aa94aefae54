"""Pictures of any names and scores, which stay small in a page."""

import io
from unittest import mock

import numpy as np
from absl.testing import absltest
from matplotlib.figure import Figure
from PIL import Image

from moh_jax.config import HeadBudget
from moh_jax.evaluation import pictures
from moh_jax.evaluation.head_stats import (
  GroupStats,
  HeadStats,
  Layer,
  RoutingMaps,
)

# A formula that is none, and a name with bytes that are not UTF-8.
_NAMES = ("a$b_{$c", "caf\udce9")


def _noise(inches):
  figure = Figure(figsize=(inches, inches))
  axis = figure.subplots()
  rng = np.random.default_rng(0)
  axis.imshow(rng.random((1000, 1000)), interpolation="nearest")
  return figure


def _stats(grid):
  """Statistics of one layer, two labels and an example of each."""
  load = np.full((2, 3), 0.5)
  groups = GroupStats(
    _NAMES, np.ones((1, 2)), (load,), (load,), (load,), np.ones((1, 2, 2))
  )
  maps = RoutingMaps(
    index=np.arange(2),
    label=np.arange(2),
    best=(np.array([[1, 2, -1, 1]] * 2, np.int16),),
    selected=(np.ones((2, 4, 2), bool),),
    inputs=np.zeros((2, 4), np.int32),
    counted=np.ones((2, 4), bool),
  )
  layers = (Layer("blocks0.0", HeadBudget(3, 1, 1, 4), (0, 1, 2), grid),)
  return HeadStats(layers, {"class": groups}, maps)


class NamesTest(absltest.TestCase):
  def test_any_name_of_a_class_can_be_shown(self):
    figure = pictures.load_by_group(_stats(None), "class")
    self.assertIn(b"a$b_{$c", pictures.encode(figure, "svg"))
    self.assertNotEmpty(pictures.encode(figure, "png"))

  def test_any_title_of_a_map_can_be_shown(self):
    for grid in (None, (2, 2)):
      figure = pictures.routing_maps(_stats(grid), _NAMES)
      content = pictures.encode(figure, "svg")
      self.assertIn(b"a$b_{$c", content)
      self.assertIn(b"caf?", content)


class PlotTest(absltest.TestCase):
  def test_the_missing_library_names_the_option(self):
    with mock.patch.dict("sys.modules", {"matplotlib": None}):
      with self.assertRaisesRegex(ValueError, "--plot needs .*matplotlib"):
        pictures.check_plot("dial.svg")
      with self.assertRaisesRegex(ValueError, "--out needs .*matplotlib"):
        pictures.check("--out")

  def test_scores_of_any_family_are_drawn(self):
    rows = [
      {"f1": x, "examples": 8, "activated_share": x, "seconds": 1.0}
      for x in (0.5, 1.0)
    ]
    labels = {axis.get_ylabel() for axis in pictures.dial(rows).axes}
    self.assertEqual(labels, {"f1"})


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

  def test_a_large_png_is_halved_until_it_is_small(self):
    rng = np.random.default_rng(0)
    png = pictures.png_of_pixels(rng.integers(0, 256, (900, 600, 3), np.uint8))
    small = pictures.shrunk(png)
    self.assertLessEqual(len(small), 400_000)
    self.assertEqual(Image.open(io.BytesIO(small)).size, (300, 450))
    self.assertIs(pictures.shrunk(small), small)

  def test_colours_are_as_many_as_heads(self):
    for count in (1, 8, 24):
      self.assertLen(set(pictures.head_colors(count)), count)


if __name__ == "__main__":
  absltest.main()
