import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint
from moh_jax.runtime.steps import load_config
from moh_jax.training.saving import NonFiniteLossError
from tests.cli import tiny_checkpoint

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_QUICK = (
  *("--config.data.batch_size=8", "--config.data.val_share=0.3"),
  *("--config.eval.batch_size=8", "--config.data.num_threads=1"),
  *("--config.optim.warmup_steps=0", "--config.checkpoint.async_save=False"),
  *("--config.log.progress=False", "--config.log.tensorboard=False"),
)


def _write_config(folder, config, sections):
  """A config file of a config with some of its fields changed."""
  values = config_lib.to_config_dict(config).to_dict()
  for section, fields in sections.items():
    values[section].update(fields)
  file = pathlib.Path(folder) / "config.py"
  file.write_text(f"def get_config():\n  return {values!r}\n")
  return file


def _train(
  workdir,
  json="-",
  traceback=False,
  vae="",
  config=tiny_checkpoint.CONFIG,
  **sections,
):
  """Exit status, stdout and stderr of `train`."""
  with tempfile.TemporaryDirectory() as folder:
    file = _write_config(folder, config, sections)
    return tiny_checkpoint.call(
      *("train", "--config", file, "--workdir", workdir),
      *("--json", json, *(["--vae", vae] if vae else [])),
      *["--traceback"] * traceback,
    )


class TrainCommandTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(root) / "run"

  def test_trains_a_checkpoint_that_evaluates_to_the_same_metrics(self):
    status, out, err = _train(self.workdir)
    self.assertEqual(status, 0, err)
    metrics = json.loads(out.splitlines()[-1])
    self.assertEqual((metrics["step"], metrics["examples"]), (2, 20))

    status, out, err = tiny_checkpoint.call(
      "evaluate", "--checkpoint", self.workdir, "--json", "-"
    )
    self.assertEqual(status, 0, err)
    again = json.loads(out)
    self.assertEqual(again.keys(), metrics.keys())
    for name, value in metrics.items():
      self.assertAlmostEqual(again[name], value, places=5, msg=name)

  def test_bad_values_are_one_line_and_nothing_is_written(self):
    gone = "/nope/images"
    for sections, message in (
      ({"optim": {"lr": -1.0}}, "optim.lr=-1.0 must be at least 0"),
      ({"data": {"source": "image_folder", "path": gone}}, gone),
      ({"vae": "sd-vae"}, "--vae 'sd-vae': the model does not work on latents"),
    ):
      status, out, err = _train(self.workdir, **sections)
      self.assertEqual((status, out), (2, ""))
      self.assertLen(err.splitlines(), 1)
      self.assertIn(message, err)
      self.assertFalse(self.workdir.exists())
    _, _, err = _train(self.workdir, traceback=True, optim={"lr": -1.0})
    self.assertIn("Traceback (most recent call last)", err)

  def test_loss_that_is_not_finite_is_a_failed_check(self):
    error = NonFiniteLossError("loss=nan at step 1")
    with mock.patch("moh_jax.training.train.train", side_effect=error):
      status, out, err = _train(self.workdir)
    self.assertEqual((status, out), (1, ""))
    self.assertEqual(err, "error: loss=nan at step 1\n")

  def test_pictures_of_latents_need_the_autoencoder(self):
    status, out, err = _train(
      self.workdir,
      config=tiny_checkpoint.DIT_CONFIG,
      data={"source": "fake"},
      diffusion={"space": "latent"},
      sample={"every": 1},
    )
    self.assertEqual((status, out), (2, ""))
    error = err.splitlines()[-1]
    self.assertStartsWith(error, "error: sample.every=1 must be 0, or --vae")
    self.assertFalse(self.workdir.exists())


class OwnImagesTest(absltest.TestCase):
  def test_from_a_folder_to_a_fine_tuned_model(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    tiny_checkpoint.save(root / "start")
    rng = np.random.default_rng(0)
    for name in ("cat", "gnu"):
      (root / "images" / name).mkdir(parents=True)
      for i in range(10):
        pixels = rng.integers(0, 256, (9, 12, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"images/{name}/{i}.png")
    status, out, err = tiny_checkpoint.call(
      *("train", f"--config={_ROOT / 'configs/images.py'}:finetune"),
      *(f"--workdir={root / 'run'}", "--json=-"),
      *(f"--config.data.path={root / 'images'}", "--config.train.steps=2"),
      *(f"--config.train.init_from={root / 'start'}", *_QUICK),
    )
    self.assertEqual(status, 0, err)
    metadata, step = checkpoint.read_metadata(root / "run")
    self.assertEqual((metadata.class_names, step), (("cat", "gnu"), 2))
    self.assertEqual(metadata.config.model.num_classes, 2)
    metrics = json.loads(out.splitlines()[-1])
    self.assertBetween(metrics["examples"], 1, 19)
    status, out, err = tiny_checkpoint.call(
      "classify", root / "images", "--checkpoint", root / "run"
    )
    self.assertEqual(status, 0, err)
    self.assertLen(out.splitlines(), 20)
    self.assertRegex(out, "(?m)0.png: (cat|gnu) .*%, (cat|gnu) ")


class TrainHelpTest(absltest.TestCase):
  def test_lists_every_key_of_the_config(self):
    spec = _ROOT / "configs" / "dit_digits.py"
    status, out, err = tiny_checkpoint.call(
      "train", "--config", spec, "--help", "--config.optim.lr=0.25"
    )
    self.assertEqual((status, err), (0, ""))
    self.assertIn("--workdir PATH", out)
    self.assertIn("\n  --config.optim.lr=0.25  (float)\n", out)
    config = load_config(str(spec))
    for section, fields in config_lib.to_config_dict(config).items():
      for field in fields:
        self.assertIn(f"\n  --config.{section}.{field}", out)


class TrainScriptTest(absltest.TestCase):
  def _call(self, *argv):
    return subprocess.run(
      [sys.executable, "train.py", *argv],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )

  def test_unknown_config_key_is_one_line_that_names_it(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = ("--config=configs/vit_digits.py", "--config.model.nope=1")
    done = self._call(f"--workdir={workdir}", *config)
    self.assertEqual((done.returncode, done.stdout), (2, ""))
    self.assertStartsWith(
      done.stderr, "error: unknown config key model.nope; known: ["
    )
    self.assertLen(done.stderr.splitlines(), 1)
    self.assertEmpty(os.listdir(workdir))


if __name__ == "__main__":
  absltest.main()
