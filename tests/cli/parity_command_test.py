"""Recorded cases pass as a user runs them: default compiler settings."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
# One of each sort that is quick; tests/parity/compare_test.py runs all.
_CASES = (
  "dit_attn_wide",
  "fid_metrics",
  "moh_dit_tiny",
  "sd_vae_tiny",
  "transnext_tiny",
  "vit_pooled_shared_routed",
)


class ParityCommandTest(absltest.TestCase):
  def test_recorded_cases_pass(self):
    cases = [_GOLDENS / name for name in _CASES]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
      [sys.executable, "-m", "moh_jax", "parity", *map(str, cases)],
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"6 case\(s\), \d+ arrays, 0 failed")


if __name__ == "__main__":
  absltest.main()
