"""One of two processes dies or stands still: the other says so and ends."""

import os
import re
import signal
import time

import pytest
from absl.testing import absltest, parameterized

from moh_jax.runtime import steps
from tests.faults.runs import Run

pytestmark = pytest.mark.faults

_OPTIONS = ("--config.train.steps=100000", "--config.checkpoint.every=50")


class PeersTest(parameterized.TestCase):
  @parameterized.product(victim=(0, 1), number=(signal.SIGKILL, signal.SIGSTOP))
  def test_other_process_ends_with_one_line(self, victim, number):
    workdir = os.path.join(self.create_tempdir().full_path, "run")
    run = Run(workdir, *_OPTIONS, processes=2)
    self.addCleanup(run.stop)
    self.assertTrue(run.wait_for(lambda: len(steps.list_steps(workdir)) > 1))
    began, other = time.monotonic(), 1 - victim
    run.processes[victim].send_signal(number)
    status = run.processes[other].wait(120)
    print(f"the other ended after {time.monotonic() - began:.1f} s")
    self.assertNotEqual(status, 0)
    self.assertNotIn("Traceback", run.said(other))
    self.assertNotIn("stack trace", run.said(other))
    # The line comes from a process of its own where this one was ended.
    self.assertTrue(_eventually(lambda: run.errors(other)))
    (line,) = run.errors(other)
    named = int(
      re.search(r"last whole checkpoint in .* is step (\d+)", line)[1]
    )
    self.assertEqual(named, steps.newest_whole_step(workdir))


def _eventually(condition) -> bool:
  for _ in range(500):
    if condition():
      return True
    time.sleep(0.02)
  return False


if __name__ == "__main__":
  absltest.main()
