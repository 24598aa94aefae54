"""`inspect`: reports on models, and pictures of batches."""

import contextlib
import pathlib

import jax
import numpy as np
from PIL import Image

from moh_jax.data.sources import make_source
from moh_jax.runtime.steps import load_config
from tests.cli import tiny_checkpoint
from tests.data import tiny_sets
from tests.training import tiny

_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
_RUN = "tests/faults/tiny_run.py"


class ModelsTest(tiny_checkpoint.CommandTest):
  COMMAND = "inspect"

  def test_describes_a_checkpoint(self):
    argv = "--checkpoint", tiny_checkpoint.stored("vit")
    report = self.report(*argv)
    self.assertEqual(report["step"], 0)
    self.assertEqual(report["class_names"], list(tiny_checkpoint.CLASS_NAMES))
    self.assertEqual(report["activated_share"], 0.5)
    self.assertEqual(report["config"]["model"]["top_k"], [1])
    layer = {
      "layer": 0, "stage": 1, "tokens": 4, "num_heads": 4, "head_dim": 2,
      "shared": 1, "routed": 3, "top_k": 1, "active": 2,
    }  # fmt: skip
    self.assertEqual(report["layers"], [layer])
    params = tiny.random_params(tiny_checkpoint.CONFIG)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.assertEqual(report["parameters"], count)
    self.assertEqual(sum(report["parameters_by_module"].values()), count)
    out = self.done(*argv)
    self.assertIn("\nrouter: two_stage (released, free)\n", out)
    self.assertRegex(out, r"(?m)^0 +1 +1 +4 +4 .* 2$")
    self.assertRegex(out, r"(?m)^classes: 6 \(ant, bee, cat, dog, eel, fox\)$")
    self.assertRegex(out, r"(?m)^activated share: 0\.5000$")

  def test_describes_a_config(self):
    config = "--config", _CONFIGS / "llm_stdlib.py:moh"
    report = self.report(*config, "--config.model.attention_impl=cudnn")
    self.assertIsNone(report["step"])
    self.assertEqual(report["config"]["model"]["attention_impl"], "cudnn")


class BatchTest(tiny_checkpoint.CommandTest):
  COMMAND = f"inspect --config {_RUN}:vit"

  def test_tiles_are_the_images_of_the_step(self):
    out = self.root / "new/sheet.png"
    lines = self.done("--batch", out, "--at-step=3").splitlines()
    config = load_config(f"{_RUN}:vit")
    stream = tiny_sets.train_stream(config, make_source(config, "train"))
    self.enterContext(contextlib.closing(stream))
    stream.seek(2)
    batch, sheet = next(stream), np.asarray(Image.open(out))
    names = ", ".join(line.partition(": ")[2] for line in lines)
    self.assertEqual(names, ", ".join(map(str, batch["label"])))
    for right, image in enumerate(batch["image"][:4, ..., 0]):
      zoom = 112 // len(image)
      side = zoom * len(image)
      tile = sheet[:, right * (side + 2) :][:side, :side]
      np.testing.assert_array_equal(tile[::zoom, ::zoom], image)
