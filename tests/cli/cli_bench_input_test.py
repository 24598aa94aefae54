"""`bench input` on images in folders and on text."""

import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.speed import input as speed_input
from moh_jax.speed import pixels
from tests.cli import tiny_checkpoint
from tests.training import tiny


def _write_images(root: pathlib.Path) -> None:
  rng = np.random.default_rng(0)
  for split in ("train", "val"):
    for label in range(10):
      folder = root / split / f"c{label}"
      folder.mkdir(parents=True)
      pixels = rng.integers(0, 256, (12, 12), np.uint8)
      Image.fromarray(pixels).save(folder / "1.png")


class BenchInputTest(parameterized.TestCase):
  def test_stages_of_images_and_the_bottleneck(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    _write_images(root)
    status, out, err = tiny_checkpoint.call(
      *("bench", "input", "--config", "tests/faults/tiny_run.py:vit"),
      *("--config.data.source=image_folder", f"--config.data.path={root}"),
      *("--batches", "2", "--steps", "2", "--json", str(root / "out.json")),
    )
    self.assertEqual(status, 0, err)
    measured = json.loads((root / "out.json").read_text())
    rates = measured["examples_per_second"]
    self.assertEqual(
      list(rates),
      ["read", "decode", "transform", "batch", "input", "to device", "step"],
    )
    self.assertGreater(min(rates.values()), 0)
    at_once = {name: rates[name] for name in ("input", "to device", "step")}
    slowest = min(at_once, key=at_once.get)
    self.assertStartsWith(measured["bottleneck"], slowest)
    self.assertIn(f"bottleneck: {measured['bottleneck']}", out)
    self.assertIn("main thread:", out)
    for name in ("main_thread_share", "waiting_share"):
      self.assertBetween(measured[name], 0, 1)

  def test_waiting_for_a_disk_is_reading_and_not_decoding(self):
    now, known = [0.0], set()

    def passed():
      now[0] += 1e-6
      return now[0]

    class Source(list):
      def read(self, index):
        now[0] += 0 if index in known else 1.0
        known.add(index)

      def __getitem__(self, index):
        self.read(index)
        now[0] += 0.5

    config = tiny.dit_config()
    with (
      mock.patch.object(speed_input.time, "perf_counter", passed),
      mock.patch.object(speed_input, "grain", mock.MagicMock()),
      mock.patch.object(speed_input, "train_recipe"),
      mock.patch.object(speed_input, "make_source", lambda *_: Source("abcde")),
    ):
      rates = speed_input._one_thread(config, None, 5)
    # The first image is read once before the clock starts.
    self.assertAlmostEqual(rates["read"], 5 / 4, places=4)
    self.assertAlmostEqual(rates["decode"], 2, places=4)

  def test_pixels_of_image_files(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    _write_images(root)
    self.enterContext(mock.patch.object(pixels, "_ROUND_SECONDS", 0.01))
    argv = "bench", "input", "--config", "tests/faults/tiny_run.py:vit"
    status, out, err = tiny_checkpoint.call(
      *(*argv, "--pixels", "--json", str(root / "out.json")),
      *("--config.data.source=image_folder", f"--config.data.path={root}"),
    )
    self.assertEqual(status, 0, err)
    measured = json.loads((root / "out.json").read_text())["pixels"]
    self.assertEqual(list(measured), ["decode", "eval", "train"])
    for times in measured.values():
      self.assertGreater(times["per_second"], 0)
      self.assertGreater(times["cpu_ms"], 0)
    self.assertIn("and transforms of training", out)
    status, _, err = tiny_checkpoint.call(*argv, "--pixels")
    self.assertEqual(status, 2)
    self.assertIn("--pixels: data.source='digits' must be one of", err)

  def test_text_has_no_images_to_decode(self):
    config = tiny.llm_config(data={"batch_size": 8}, mesh={"data": -1})
    rates = speed_input.measure(config, 1, 1)["examples_per_second"]
    self.assertEqual(
      list(rates), ["read", "batch", "input", "to device", "step"]
    )


if __name__ == "__main__":
  absltest.main()
