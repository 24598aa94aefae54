"""Pictures and the report: any names and scores, and what a run recorded."""

import base64
import dataclasses
import io
import json
import re
from unittest import mock

import numpy as np
from absl.testing import absltest
from matplotlib.colors import to_hex
from PIL import Image

from moh_jax.config import HeadBudget
from moh_jax.config.heads import Units
from moh_jax.evaluation import pictures, report
from moh_jax.evaluation.head_stats import (
  GroupStats,
  HeadStats,
  Layer,
  RoutingMaps,
)
from tests import folders
from tests.training import tiny

# A formula that is none, and a name with bytes that are not UTF-8.
_NAMES = ("a$b_{$c", "caf\udce9")
_HUGE = 10**400


def _stats(grid=None, top_k=1, best=((1, 2, -1, 1),) * 2, counted=True):
  """Statistics of one layer, two labels and an example of each."""
  load = np.full((2, 3), 0.5)
  groups = GroupStats(
    _NAMES, np.ones((1, 2)), (load,), (load,), (load,), np.ones((1, 2, 2))
  )
  maps = RoutingMaps(
    index=np.arange(2),
    label=np.arange(2),
    best=(np.array(best, np.int16),),
    selected=(np.ones((2, 4, 2), bool),),
    inputs=np.array([[7, 8, 9, 0]] * 2, np.int32),
    counted=np.broadcast_to(counted, (2, np.size(counted))),
  )
  budget = HeadBudget(3, 1, top_k, 4)
  layers = (Layer("blocks0.0", budget, Units(budget), (2, 0, 1), grid),)
  return HeadStats(layers, {"all": groups, "class": groups}, maps)


def _budget(top_k):
  budget = HeadBudget(4, 1, top_k, 4)
  return budget, Units(budget)


class PicturesTest(absltest.TestCase):
  def test_any_name_can_be_shown(self):
    for figure in (
      pictures.load_by_group(_stats(), "class"),
      *(pictures.routing_maps(_stats(g), _NAMES) for g in (None, (2, 2))),
    ):
      content = pictures.encode(figure, "svg")
      self.assertIn(b"a$b_{$c", content)
      self.assertIn(b"caf?", content)

  def test_control_characters_of_names_are_text(self):
    figure = pictures.new_figure()
    figure.suptitle("a\x1b[31m")
    self.assertIn(b"a\\x1b[31m", pictures.encode(figure, "svg"))
    stats = _stats()
    group = stats.groups["class"]
    names = [f"\x1b]0;{i}\x07\n" for i in range(len(group.names))]
    group = dataclasses.replace(group, names=names)
    stats = dataclasses.replace(stats, groups={"class": group})
    figure = pictures.load_by_group(stats, "class")
    self.assertIn(b"\\x1b]0;1\\x07\\x0a", pictures.encode(figure, "svg"))
    self.assertNotIn(b"\x1b", pictures.encode(figure, "svg"))
    self.assertEqual(report._escaped("<\x1b"), "&lt;\\x1b")

  def test_the_same_picture_is_the_same_file(self):
    made = [pictures.load_by_group(_stats(), "class") for _ in range(2)]
    one, other = (pictures.encode(figure, "svg") for figure in made)
    self.assertEqual(one, other)
    self.assertNotIn(b"<dc:date>", one)

  def test_heads_have_one_number_everywhere(self):
    # The layer lists head 2 first: it is shared, 0 and 1 are routed.
    (axis, *_) = pictures.load_by_group(_stats(), "class").axes
    ticks = [text.get_text() for text in axis.get_xticklabels()]
    self.assertEqual(ticks, ["0", "1"])
    loads = {"blocks0.0": [(1, [0.2, 0.8])]}
    stats = _stats()
    for figure in (
      pictures.routing_maps(stats, _NAMES),
      pictures.load_over_steps(loads, stats.layers),
    ):
      (legend,) = figure.legends
      labels = [text.get_text() for text in legend.get_texts()]
      self.assertEqual(labels, ["head 0", "head 1"])
      colors = [to_hex(x.get_facecolor()).upper() for x in legend.get_patches()]
      self.assertEqual(colors, pictures.head_colors(3)[:2])


class VerdictTest(absltest.TestCase):
  def _verdict(self, *loads, top_k=1, similarity=0.0, **router):
    """The sentences of a layer with 1 shared and 3 routed heads."""
    layer = Layer("blocks0.0", *_budget(top_k), (2, 0, 1, 3))
    load = (np.array([[1.0, *loads]]),)
    groups = GroupStats(
      ("all",), np.ones((1, 1)), load, load, load, np.ones((1, 1, 2))
    )
    stats = HeadStats((layer,), {"all": groups}, None)
    cosines = np.eye(4)
    cosines[1, 3] = cosines[3, 1] = similarity
    config = tiny.llm_config(model={"router": router})
    return report.verdict(config, stats, {"blocks0.0": cosines})

  def test_even_heads_need_nothing(self):
    first, second, third = self._verdict(0.3, 0.33, 0.37)
    self.assertStartsWith(first, "Heads are used evenly: ")
    self.assertIn("1.00 (1: all heads", first)
    self.assertEqual(second, "What stands out: no layer and no head.")
    self.assertEqual(third, "What to do: nothing.")

  def test_what_stands_out_is_named_with_what_to_do(self):
    for sentences, seen, remedy in (
      (self._verdict(1, 0.6, 0.4, top_k=2), "0 of blocks0.0 (load 1)", "share"),
      (
        self._verdict(0.5, 0.5, 0),
        "3 of blocks0.0 (load 0)",
        "leave out heads",
      ),
      (
        self._verdict(1, 0, 0),
        "blocks0.0 (collapsed to the same heads)",
        "raise",
      ),
      (self._verdict(1, 1, 1, top_k=3), "blocks0.0 (no choice)", "model.top_k"),
      (self._verdict(0.1, 0.1, 0.8), "blocks0.0 (uneven load)", "evens"),
      (
        self._verdict(0.3, 0.3, 0.4, similarity=0.99),
        *("heads 1 and 3 of blocks0.0 (equal)", "leave out one of two"),
      ),
    ):
      _, second, third = sentences
      self.assertStartsWith(second, "What stands out: ")
      self.assertIn(seen, second)
      self.assertIn(remedy, third)
    self.assertIn(
      "unevenly in 1 of 1 layers: the", self._verdict(0.1, 0.1, 0.8)[0]
    )
    self.assertIn("No layer has a choice", self._verdict(1, 1, 1, top_k=3)[0])

  def test_losses_are_explained_where_training_differs(self):
    def page(**sections):
      config = tiny.deterministic_config(**sections)
      return report._losses(mock.Mock(config=config, metrics=metrics))

    metrics = report.RunMetrics({"loss": {"val": [(1, 2.0)]}}, {})
    self.assertNotIn("rightly", page(data={"augment": "none"}))
    text = page(data={"augment": "shift"}, classifier={"label_smoothing": 0.1})
    self.assertIn("has augment=shift, label_smoothing=0.1: its", text)


class SamplesTest(folders.FolderTest):
  def _samples(self, stats, config=None, **options):
    config = config or tiny.llm_config()
    return report.samples(config, {}, None, stats, None, None, **options)

  def test_tokens_have_the_number_and_colour_of_their_head(self):
    stats = _stats(counted=(True, True, True, False))  # the last is padding
    page = self._samples(stats)
    found = re.findall(
      r'title="head (\d)" style="background:(#\w{6})99">', page
    )
    colors = pictures.head_colors(3)
    self.assertLen(set(colors), 3)
    self.assertEqual(found, [("1", colors[1]), ("2", colors[2])] * 2)
    self.assertIn("</span>9 </p>", page)  # this token selects none
    self.assertEqual(report.token_texts(None, stats), [["7 ", "8 ", "9 "]] * 2)
    stats = HeadStats((), {}, _stats().maps)  # of a family without padding
    self.assertIn("<pre>7 8 9 0 </pre>", self._samples(stats))

  def test_a_large_preview_of_the_run_becomes_smaller(self):
    self.assertIsNone(report.run_preview(str(self.root), 3))
    (self.root / "samples").mkdir()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1024, 1024, 3), np.uint8)
    Image.fromarray(noise).save(self.root / "samples" / "00000003.png")
    (self.root / "samples" / "00000004.png").write_text("of a later step")
    with self.assertRaisesRegex(ValueError, "00000004.png: not an image"):
      report.run_preview(str(self.root), 4)
    preview = report.run_preview(str(self.root), 3)
    page = self._samples(_stats(), tiny.dit_config(), preview=preview)
    self.assertIn("samples of the run", page)
    self.assertLess(len(page), 600_000)
    (data,) = re.findall(r"base64,([^\"]*)", page)
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    self.assertEqual(picture.size, (256, 256))


class CurvesTest(absltest.TestCase):
  def test_accuracy_is_of_what_the_model_reads(self):
    metrics = report.RunMetrics({"accuracy": {"val": [(1, 0.5)]}}, {})
    for config, said, other in (
      (tiny.llm_config(), "share of next tokens", "images"),
      (tiny.deterministic_config(), "share of images", "next tokens"),
    ):
      text = report._losses(mock.Mock(config=config, metrics=metrics))
      self.assertIn(f"<b>accuracy</b>: {said}", text)
      self.assertNotIn(other, text)


class RunMetricsTest(folders.FolderTest):
  def _read(self, lines, last):
    (self.root / "metrics.jsonl").write_text("\n".join(lines))
    return report.read_run_metrics(str(self.root), last=last)

  def test_rows_that_are_no_metrics_are_left_out(self):
    rows = [
      {"step": 1, "split": "train", "loss": _HUGE, "lr": float("nan")},
      {"step": 2, "split": "train", "loss": 2.5},
      {"step": 2, "split": "heads", "blocks1.0": [_HUGE, 0.5]},
      {"step": 1, "split": "heads", "blocks0.0": [0.25, 0.75]},
      {"step": 2, "split": "heads", "blocks0.0": [0.25]},  # other heads
      {"step": 3, "split": "heads", "blocks0.0": [0.5, 0.5]},
      {"step": 10, "split": "train", "loss": 1.0},  # after the checkpoint
    ]
    found = self._read([*map(json.dumps, rows), "{damaged", "[]"], last=9)
    self.assertEqual(found.curves, {"loss": {"train": [(2, 2.5)]}})
    expected = {"blocks0.0": [(1, [0.25, 0.75]), (3, [0.5, 0.5])]}
    self.assertEqual(found.loads, expected)

  def test_long_curves_are_thinned_out(self):
    row = '{{"step": {}, "split": "train", "loss": 1.0}}'
    found = self._read(map(row.format, range(1203)), last=9999)
    points = found.curves["loss"]["train"]
    self.assertBetween(len(points), 250, 500)
    self.assertEqual(points[-1], (1202, 1.0))
