"""Runs of two processes that disagree, or that one SIGTERM stops."""

import os
import signal
import time

import pytest
from absl.testing import absltest, parameterized

from moh_jax.runtime import steps
from tests.faults.runs import Run, rows

pytestmark = pytest.mark.faults


class ProcessesTest(parameterized.TestCase):
  def _start(self, *options, **more) -> Run:
    workdir = more.pop("workdir", None)
    workdir = workdir or os.path.join(self.create_tempdir().full_path, "run")
    run = Run(workdir, *options, processes=2, **more)
    self.addCleanup(run.stop)
    return run

  def test_other_config_is_refused_with_the_difference(self):
    began = time.monotonic()
    run = self._start(last=["--config.train.seed=5"])
    self.assertEqual(run.wait(), 2, run.said())
    print(f"refused after {time.monotonic() - began:.1f} s")
    for index in (0, 1):
      (line,) = run.errors(index)
      self.assertIn("config.train.seed: 0 in process 0, 5 in process 1", line)
    self.assertEqual(steps.list_steps(str(run.workdir)), [])

  @parameterized.parameters(0, 1)
  def test_sigterm_during_an_evaluation_saves_everywhere(self, victim):
    # The first evaluation, after step 3, has 2,000 batches.
    long = ("--config.eval.batch_size=2", "--config.data.fake_examples=4000")
    run = self._start(*long, "--config.eval.every=3", family="vit")
    self.assertTrue(run.wait_for_step(3))
    time.sleep(1.0)
    run.processes[victim].send_signal(signal.SIGTERM)
    began = time.monotonic()
    self.assertEqual([p.wait(60) for p in run.processes], [0, 0], run.said())
    print(f"both ended after {time.monotonic() - began:.1f} s")
    for index in (0, 1):
      self.assertIn("stopped at step 3, saved", run.said(index))
    self.assertNotIn((3, "val"), rows(run.workdir))
    self.assertEqual(steps.list_steps(str(run.workdir))[-1], 3)


if __name__ == "__main__":
  absltest.main()
