"""Every recorded case passes as a user runs it: default compiler settings."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


class ParityCommandTest(absltest.TestCase):
  def test_all_recorded_cases_pass(self):
    cases = sorted(path.parent for path in _GOLDENS.glob("*/meta.json"))
    self.assertLen(cases, 22)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
      [sys.executable, "-m", "moh_jax", "parity", *map(str, cases)],
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"22 case\(s\), \d+ arrays, 0 failed")


if __name__ == "__main__":
  absltest.main()
