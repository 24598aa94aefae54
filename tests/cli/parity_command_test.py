"""Recorded cases pass as a user runs them: default compiler settings."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
# Layers and metrics: a whole model takes many seconds to optimize.
# tests/parity/compare_test.py runs all cases, without optimization.
_QUICK = "dit_attn_wide", "fid_metrics", "vit_pooled_shared_routed"
_MODELS = "moh_dit_tiny", "sd_vae_tiny", "transnext_tiny"


class ParityCommandTest(absltest.TestCase):
  def test_recorded_layers_pass(self):
    self._check(_QUICK)

  @pytest.mark.slow
  def test_recorded_models_pass(self):
    self._check(_MODELS)

  def _check(self, names):
    cases = [_GOLDENS / name for name in names]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
      [sys.executable, "-m", "moh_jax", "parity", *map(str, cases)],
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"3 case\(s\), \d+ arrays, 0 failed")


if __name__ == "__main__":
  absltest.main()
