"""Pictures and the report: any names, and what a layer's loads say."""

import numpy as np
from absl.testing import absltest
from matplotlib.colors import to_hex

from moh_jax.config import HeadBudget
from moh_jax.config.heads import Units
from moh_jax.evaluation import pictures, report
from moh_jax.evaluation.head_stats import (
  GroupStats,
  HeadStats,
  Layer,
  RoutingMaps,
)
from moh_jax.evaluation.similarity import HeadSimilarity
from tests.training import tiny


def _stats():
  """Statistics of one layer of images, two labels and an example of each."""
  groups = GroupStats(
    ("ant", "bee"), (np.full((2, 3), 0.5),), np.ones((1, 2, 2))
  )
  best = np.array([[1, 2, -1, 1]] * 2, np.int16)
  maps = RoutingMaps(np.arange(2), (best,), np.zeros(2), np.ones((2, 1)))
  budget = HeadBudget(3, 1, 1, 4)
  layers = (Layer("blocks0.0", budget, Units(budget), (2, 0, 1), (2, 2)),)
  return HeadStats(layers, {"all": groups, "class": groups}, maps)


class PicturesTest(absltest.TestCase):
  def test_heads_have_one_number_everywhere(self):
    # The layer lists head 2 first: it is shared, 0 and 1 are routed.
    (axis, *_) = pictures.load_by_group(_stats(), "class").axes
    ticks = [text.get_text() for text in axis.get_xticklabels()]
    self.assertEqual(ticks, ["0", "1"])
    (legend,) = pictures.routing_maps(_stats(), None).legends
    labels = [text.get_text() for text in legend.get_texts()]
    self.assertEqual(labels, ["head 0", "head 1"])
    colors = [to_hex(x.get_facecolor()).upper() for x in legend.get_patches()]
    self.assertEqual(colors, pictures.head_colors(3)[:2])


class VerdictTest(absltest.TestCase):
  def _verdict(self, *loads, top_k=1, similarity=0.0, **router):
    """The sentences of a layer with 1 shared and 3 routed heads."""
    budget = HeadBudget(4, 1, top_k, 4)
    layer = Layer("blocks0.0", budget, Units(budget), (2, 0, 1, 3))
    load = (np.array([[1.0, *loads]]),)
    groups = GroupStats(("all",), load, np.ones((1, 1, 2)))
    stats = HeadStats((layer,), {"all": groups}, None)
    cosines = np.eye(4)
    cosines[1, 3] = cosines[3, 1] = similarity
    config = tiny.llm_config(model={"router": router})
    similar = HeadSimilarity({}, {"blocks0.0": cosines})
    return report.verdict(config, stats, similar)

  def test_even_heads_need_nothing(self):
    first, second, third = self._verdict(0.3, 0.33, 0.37)
    self.assertStartsWith(first, "Heads are used evenly: ")
    self.assertIn("1.00 (1: all heads", first)
    self.assertEqual(second, "What stands out: no layer and no head.")
    self.assertEqual(third, "What to do: nothing.")

  def test_what_stands_out_is_named_with_what_to_do(self):
    for loads, more, seen, remedy in (
      ((1, 0.6, 0.4), {"top_k": 2}, "0 of blocks0.0 (load 1)", "share"),
      ((0.5, 0.5, 0), {}, "3 of blocks0.0 (load 0)", "leave out heads"),
      ((1, 0, 0), {}, "blocks0.0 (collapsed to the same heads)", "raise"),
      ((1, 1, 1), {"top_k": 3}, "blocks0.0 (no choice)", "model.top_k"),
      ((0.1, 0.1, 0.8), {}, "blocks0.0 (uneven load)", "evens"),
      ((0.3, 0.3, 0.4), {"similarity": 0.99}, "heads 1 and 3 of", "one of two"),
    ):
      _, second, third = self._verdict(*loads, **more)
      self.assertIn(seen, second)
      self.assertIn(remedy, third)
    self.assertIn(
      "unevenly in 1 of 1 layers: the", self._verdict(0.1, 0.1, 0.8)[0]
    )
    self.assertIn("No layer has a choice", self._verdict(1, 1, 1, top_k=3)[0])
