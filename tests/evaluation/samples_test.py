"""Examples of a report, where layers route nothing or there is no router."""

import base64
import io
import json
import pathlib
import re

import numpy as np
from absl.testing import absltest
from PIL import Image

from moh_jax.config import HeadBudget
from moh_jax.evaluation.head_stats import HeadStats, Layer, RoutingMaps
from moh_jax.evaluation.samples import samples, token_texts
from moh_jax.inference.restore import Restored
from tests.training import tiny

_BEST = (
  np.full((1, 4), -1, np.int16),  # a layer that routes nothing
  np.array([[2, 1, -1, -1]], np.int16),
)
_LAYERS = (
  Layer("blocks0.0", HeadBudget(3, 1, 0, 4), (0, 1, 2)),
  Layer("blocks1.0", HeadBudget(3, 1, 1, 4), (0, 1, 2)),
)


def _stats(layers, best, counted):
  maps = RoutingMaps(
    index=np.zeros(1, np.int32),
    label=np.zeros(1, np.int32),
    best=best,
    selected=(),
    inputs=np.array([[7, 8, 9, 0]]),
    counted=np.array([counted]),
  )
  return HeadStats(layers, {}, maps)


class TextTest(absltest.TestCase):
  def test_tokens_that_no_layer_routes_are_shown(self):
    stats = _stats(_LAYERS, _BEST, [True, True, True, False])
    self.assertEqual(token_texts(None, stats), [["7 ", "8 ", "9 "]])

  def test_padding_is_left_out_without_a_router(self):
    stats = _stats((), (), [True, True, True, False])
    self.assertEqual(token_texts(None, stats), [["7 ", "8 ", "9 "]])
    stats = _stats((), (), [True])  # of a family without padding
    self.assertEqual(token_texts(None, stats), [["7 ", "8 ", "9 ", "0 "]])

  def test_every_layer_has_a_head_or_none_for_each_token(self):
    stats = _stats(_LAYERS, _BEST, [True, True, True, False])
    restored = Restored(tiny.llm_config(), None, {}, 0, ())
    page = samples(restored, "", None, stats, ("text",), None, None)
    (data,) = re.findall(r'id="routing">(.*)</script>', page)
    heads = [x["heads"] for x in json.loads(data)["layers"].values()]
    self.assertEqual(heads, [[[-1, -1, -1]], [[1, 0, -1]]])


class PreviewTest(absltest.TestCase):
  def test_a_large_preview_of_the_run_becomes_smaller(self):
    run = pathlib.Path(self.create_tempdir().full_path)
    (run / "samples").mkdir()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1024, 1024, 3), np.uint8)
    Image.fromarray(noise).save(run / "samples" / "00000000.png")
    restored = Restored(tiny.dit_config(), None, {}, 0, ())
    stats = _stats((), (), [True])
    page = samples(restored, str(run), None, stats, (), None, None)
    self.assertIn("samples of the run", page)
    self.assertLess(len(page), 600_000)
    (data,) = re.findall(r"base64,([^\"]*)", page)
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    self.assertEqual(picture.size, (256, 256))


if __name__ == "__main__":
  absltest.main()
