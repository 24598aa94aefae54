"""`show-batch`: the sheet holds the pixels of the run's batch."""

import dataclasses
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.cli import show_batch
from moh_jax.data import pipeline
from moh_jax.data.sources import make_source
from moh_jax.runtime.steps import load_config
from moh_jax.training import classification
from tests.cli import tiny_checkpoint

_RUN = "tests/faults/tiny_run.py"
_GAP = 2  # white pixels between the images of a grid


class ShowBatchTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._folder = self.enterContext(tempfile.TemporaryDirectory())
    self._out = pathlib.Path(self._folder) / "sheet.png"

  def _call(self, *argv, run=f"{_RUN}:vit"):
    return tiny_checkpoint.call(
      "show-batch", "--config", run, "--out", str(self._out), *argv
    )

  def _batch(self, step):
    """The run's whole batch of a step."""
    config = load_config(f"{_RUN}:vit", ["classifier.mixup=0."])
    dataset = pipeline.train_images(config, make_source(config, "train"))
    rows = range(config.data.batch_size)
    stream = pipeline.TrainBatches(dataset, config.data, rows)
    stream.seek(step - 1)
    batch = next(stream)
    stream.close()
    return batch

  @parameterized.parameters(1, 3)
  def test_tiles_are_the_images_of_the_step(self, step):
    named = []
    captioned = show_batch._captioned
    with mock.patch.object(
      show_batch, "_captioned", lambda *a: named.append(a[1]) or captioned(*a)
    ):
      status, out, err = self._call(
        *("--num", "4", "--columns", "4", "--step", step),
        *("--config.classifier.mixup=0.", "--config.classifier.cutmix=0."),
      )
    self.assertEqual(status, 0, err)
    self.assertIn(f"4 images of step {step} written to {self._out}", out)
    batch = self._batch(step)
    rows = [0, 1, len(batch["label"]) - 2, len(batch["label"]) - 1]
    self.assertEqual(named, [str(batch["label"][row]) for row in rows])
    sheet = np.asarray(Image.open(self._out))
    for place, row in enumerate(rows):
      image = batch["image"][row][..., 0]
      zoom = 112 // image.shape[1]
      left = place * (zoom * image.shape[1] + _GAP)
      tile = sheet[: zoom * image.shape[0], left : left + zoom * len(image)]
      np.testing.assert_array_equal(tile[::zoom, ::zoom], image)

  def test_mixed_images_have_both_names_and_shares(self):
    config = load_config(f"{_RUN}:vit")
    classifier = dataclasses.replace(config.classifier, mixup=1.0, cutmix=0.0)
    config = dataclasses.replace(
      config, sections={**config.sections, "classifier": classifier}
    )
    batch = self._batch(1)
    images, targets = show_batch._mixed(config, batch)
    names = tuple(map(str, range(10)))
    for target, label, other in zip(
      targets, batch["label"], batch["label"][::-1]
    ):
      name = show_batch._name(target, names)
      if label == other:
        self.assertEqual(name, str(label))
      else:
        parts = dict(part.rsplit(" ", 1) for part in name.split(" + "))
        self.assertEqual(set(parts), {str(label), str(other)})
        self.assertEqual(parts[str(label)], f"{target[label]:.0%}")
    with mock.patch.object(classification, "mix_images", lambda _, *a: a[:2]):
      plain, _ = show_batch._mixed(config, batch)
    np.testing.assert_array_equal(plain, batch["image"])
    self.assertFalse(np.array_equal(images, plain))

  @parameterized.parameters(
    (("--config.data.batch_size=1",), 1),
    (("--config.data.batch_size=5",), 4),
    (("--num", "1"), 1),
    (("--num", "3"), 3),
  )
  def test_number_is_what_the_batch_has(self, argv, expected):
    status, out, err = self._call(*argv)
    self.assertEqual(status, 0, err)
    self.assertStartsWith(out, f"{expected} images of")

  @parameterized.parameters(
    (("--step", "0"), "--step: 0 must be at least 1"),
    (("--out", "sheet.jpg"), "--out 'sheet.jpg' must end in .png"),
  )
  def test_bad_options_are_named(self, argv, message):
    status, _, err = self._call(*argv)
    self.assertEqual(status, 2)
    self.assertIn(message, err)
    self.assertFalse(self._out.exists())

  @parameterized.parameters(f"{_RUN}:llm", "configs/dit.py:s2_90")
  def test_text_and_latents_have_no_pixels(self, run):
    status, _, err = self._call(run=run)
    self.assertEqual(status, 2)
    self.assertIn("show-batch shows pixels, not text or latents", err)


if __name__ == "__main__":
  absltest.main()
