"""Two runs at once in one working directory."""

import os
import time

import pytest
from absl.testing import absltest

from tests.faults.runs import Run, differences

pytestmark = pytest.mark.faults

_TIMES = int(os.environ.get("MOH_JAX_FAULTS_SECOND_RUNS", "50"))
_LONG = ("--config.train.steps=4000", "--config.checkpoint.every=50")


class TwoRunsTest(absltest.TestCase):
  def _run(self, *options) -> Run:
    workdir = os.path.join(self.create_tempdir().full_path, "run")
    run = Run(workdir, *_LONG, *options)
    self.addCleanup(run.stop)
    return run

  def test_second_run_is_refused_and_the_first_unharmed(self):
    whole = self._run()
    self.assertEqual(whole.wait(900), 0, whole.said())
    first, refused, slowest, firsts = self._run(), 0, 0.0, 1
    first.wait_for_step(1)
    while refused < _TIMES:
      if first.processes[0].poll() is not None:
        self.assertEqual(differences(first.workdir, whole.workdir), [])
        first, firsts = self._run(), firsts + 1
        first.wait_for_step(1)
      began = time.monotonic()
      second = Run(str(first.workdir), *_LONG, name="second")
      status = second.wait(60)
      if first.processes[0].poll() is not None:
        continue  # it ended meanwhile, so that nothing was in the way
      slowest = max(slowest, time.monotonic() - began)
      self.assertEqual(status, 2)
      (line,) = second.errors()
      self.assertIn(f"process {first.processes[0].pid} on host", line)
      refused += 1
    self.assertEqual(first.wait(900), 0, first.said())
    self.assertEqual(differences(first.workdir, whole.workdir), [])
    print(f"refused {refused} times in {slowest:.1f} s at most, {firsts} runs")


if __name__ == "__main__":
  absltest.main()
