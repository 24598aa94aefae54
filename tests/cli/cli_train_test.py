import json
import pathlib
from unittest import mock

import chex
import pytest

from moh_jax.training.saving import NonFiniteLossError
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_QUICK = """data.batch_size=8 data.val_share=0.3 data.num_threads=1
  eval.batch_size=8 optim.warmup_steps=0 log.tensorboard=False""".split()


class TrainTest(tiny_checkpoint.CommandTest):
  COMMAND = "train"

  def call(self, *argv):
    config = tiny_checkpoint.write_config(self.root, tiny_checkpoint.CONFIG)
    where = "--config", config, "--workdir", self.root / "run"
    return super().call(*where, *argv)

  @pytest.mark.integration
  def test_trains_a_checkpoint_that_evaluates_to_the_same_metrics(self):
    metrics = json.loads(self.done("--json=-").splitlines()[-1])
    self.assertEqual((metrics["step"], metrics["examples"]), (2, 20))
    argv = ("--checkpoint", self.root / "run", "--json=-")
    again = json.loads(tiny_checkpoint.done("evaluate", *argv))
    chex.assert_trees_all_close(again, metrics, atol=5e-6, rtol=0)
    out = self.done()
    self.assertRegex(out, r"(?m)^held-out: .*accuracy 0\.\d{4}.*, step 2$")
    self.assertIn(f"checkpoint: {self.root / 'run'}\n", out)

  def test_loss_that_is_not_finite_is_a_failed_check(self):
    error = NonFiniteLossError("loss=nan at step 1")
    with mock.patch("moh_jax.training.train.train", side_effect=error):
      result = self.call()
    self.assertEqual(result, (1, "", "error: loss=nan at step 1\n"))

  def test_a_refused_start_leaves_no_folder_of_its_own(self):
    other = "--config.train.init_from=no/run"
    self.assert_refused("no/run holds no checkpoint", other)
    self.assertFalse((self.root / "run").exists())
    (self.root / "run").mkdir()
    self.assert_refused("no/run holds no checkpoint", other)
    self.assertIn("Traceback", (self.root / "run" / "run.log").read_text())


class OwnImagesTest(tiny_checkpoint.CommandTest):
  COMMAND = f"train --config={_ROOT / 'configs/images.py'}:finetune"

  @pytest.mark.integration
  def test_from_a_folder_to_a_fine_tuned_model(self):
    root = self.root
    tiny_vae.save_images(root / "images", per_class=10)
    out = self.done(
      *(f"--workdir={root / 'run'}", "--json=-"),
      *(f"--config.data.path={root / 'images'}", "--config.train.steps=2"),
      f"--config.train.init_from={tiny_checkpoint.stored('vit')}",
      *(f"--config.{key}" for key in _QUICK),
    )
    metrics = json.loads(out.splitlines()[-1])
    self.assertBetween(metrics["examples"], 1, 19)
    argv = (root / "images", "--checkpoint", root / "run")
    out = tiny_checkpoint.done("classify", *argv)
    self.assertLen(out.splitlines(), 20)
    self.assertRegex(out, "(?m)0.png: (ant|cat) .*%, (ant|cat) ")
