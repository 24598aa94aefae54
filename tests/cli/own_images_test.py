"""From a folder of images to a fine-tuned model, by the commands."""

import json
import pathlib
import tempfile

import numpy as np
import pytest
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_QUICK = (
  *("--config.train.steps=2", "--config.data.batch_size=8"),
  *("--config.eval.batch_size=8", "--config.data.num_threads=1"),
  *("--config.optim.warmup_steps=0", "--config.checkpoint.async_save=False"),
  *("--config.log.progress=False", "--config.log.tensorboard=False"),
)


class OwnImagesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.start, self.workdir = self.root / "start", self.root / "run"

  def _write(self, *names, count=10):
    rng = np.random.default_rng(0)
    for name in names:
      folder = self.root / "images" / name
      folder.mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 256, (9, 12, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")

  def _train(self, config, *overrides):
    return tiny_checkpoint.call(
      "train",
      f"--config={_CONFIGS / config}",
      f"--workdir={self.workdir}",
      f"--config.data.path={self.root / 'images'}",
      f"--config.train.init_from={self.start}",
      *_QUICK,
      *overrides,
      *("--json", self.root / "metrics.json"),
    )

  def test_classifier_of_own_classes(self):
    tiny_checkpoint.save(self.start)
    self._write("cat", "gnu")
    share = "--config.data.val_share=0.3"
    status, _, err = self._train("images.py:finetune", share)
    self.assertEqual(status, 0, err)
    metadata, step = checkpoint.read_metadata(self.workdir)
    self.assertEqual((metadata.class_names, step), (("cat", "gnu"), 2))
    self.assertEqual(metadata.config.model.num_classes, 2)
    metrics = json.loads((self.root / "metrics.json").read_text())
    self.assertBetween(metrics["examples"], 1, 19)

    status, out, err = tiny_checkpoint.call(
      "classify", self.root / "images", "--checkpoint", self.workdir
    )
    self.assertEqual(status, 0, err)
    self.assertLen(out.splitlines(), 20)
    self.assertRegex(out, "(?m)0.png: (cat|gnu) .*%, (cat|gnu) ")

  @pytest.mark.slow
  def test_unconditional_diffusion(self):
    tiny_checkpoint.save_dit(self.start)
    self._write("")
    status, _, err = self._train("dit.py:finetune_pixels")
    self.assertEqual(status, 0, err)
    metadata, _ = checkpoint.read_metadata(self.workdir)
    self.assertEqual(metadata.config.model.num_classes, 1)
    self.assertLen(metadata.class_names, 1)


if __name__ == "__main__":
  absltest.main()
