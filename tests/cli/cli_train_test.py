import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import tiny_checkpoint
from absl import logging
from absl.testing import absltest

from moh_jax import config as config_lib
from moh_jax.cli import main
from moh_jax.training import loop

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _train(workdir, json="-", traceback=False, **sections):
  """Exit status, stdout and stderr of the body of train.py."""
  cfg = config_lib.to_config_dict(tiny_checkpoint.CONFIG)
  with cfg.unlocked():
    for section, fields in sections.items():
      cfg[section].update(fields)
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      main.train(
        cfg,
        str(workdir),
        distributed=False,
        json=json,
        traceback=traceback,
      )
    except SystemExit as stop:
      return stop.code, out.getvalue(), err.getvalue()
  raise AssertionError("train must exit with a status")


class TrainCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(root) / "run"
    self.addCleanup(logging.set_verbosity, logging.get_verbosity())

  def test_trains_a_checkpoint_that_evaluates_to_the_same_figures(self):
    status, out, err = _train(self.workdir)
    self.assertEqual(status, 0, err)
    figures = json.loads(out.splitlines()[-1])
    self.assertEqual((figures["step"], figures["examples"]), (2, 20))

    status, out, err = tiny_checkpoint.call(
      "evaluate", "--checkpoint", self.workdir, "--json", "-"
    )
    self.assertEqual(status, 0, err)
    again = json.loads(out)
    self.assertEqual(again.keys(), figures.keys())
    for name, value in figures.items():
      self.assertAlmostEqual(again[name], value, places=5, msg=name)

  def test_bad_value_is_one_line_that_names_it(self):
    status, out, err = _train(self.workdir, optim={"lr": -1.0})
    self.assertEqual((status, out), (2, ""))
    self.assertEqual(err, "error: optim.lr=-1.0 must be at least 0\n")

  def test_bad_data_is_one_line_that_names_it(self):
    data = {"source": "image_folder", "path": "/nope/images"}
    status, _, err = _train(self.workdir, data=data)
    self.assertEqual(status, 2)
    self.assertLen(err.splitlines(), 1)
    self.assertIn("data.path='/nope/images'", err)

  def test_traceback_is_shown_on_request(self):
    _, _, err = _train(self.workdir, traceback=True, optim={"lr": -1.0})
    self.assertIn("Traceback (most recent call last)", err)

  def test_loss_that_is_not_finite_is_a_failed_check(self):
    error = loop.NonFiniteLossError("loss=nan at step 1")
    with mock.patch.object(loop, "train", side_effect=error):
      status, out, err = _train(self.workdir)
    self.assertEqual((status, out), (1, ""))
    self.assertEqual(err, "error: loss=nan at step 1\n")


class TrainScriptTest(absltest.TestCase):
  def test_unknown_config_key_fails_and_is_named(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = ("--config=configs/vit_digits.py", "--config.model.nope=1")
    done = subprocess.run(
      [sys.executable, "train.py", f"--workdir={workdir}", *config],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("nope", done.stderr)
    self.assertEmpty(os.listdir(workdir))


if __name__ == "__main__":
  absltest.main()
