"""Runs of two processes: they agree, stop and end together."""

import signal

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import RunsTest

pytestmark = pytest.mark.faults


class ProcessesTest(RunsTest):
  @parameterized.parameters(
    ("train.seed=5", r"config.train.seed: 5 here, 0 there"),
    ("mesh.data=3", r"config.mesh.data: 3 here, -?\d there"),
  )  # a mesh that is impossible too
  def test_other_config_is_refused_with_the_difference(self, other, message):
    run = self.start(last=[f"--config.{other}"], processes=2)
    self.assertEqual(run.wait(), 2, run.said())
    for index in (0, 1):
      (line,) = run.errors(index)
      self.assertRegex(line, message)
    self.assertEqual(steps.list_steps(str(run.workdir)), [])

  @parameterized.parameters(0, 1)
  def test_sigterm_of_one_process_saves_everywhere(self, victim):
    run = self.start("--config.train.steps=100000", processes=2)
    self.assertTrue(run.wait_for_step(3))
    run.processes[victim].send_signal(signal.SIGTERM)
    self.assertEqual([p.wait(60) for p in run.processes], [0, 0], run.said())
    for index in (0, 1):
      self.assertIn("saved; run again to resume", run.said(index))

  @parameterized.parameters(0, 1)
  def test_other_process_ends_too(self, victim):
    """By JAX's own watch, after 100 seconds at most."""
    endless = "--config.train.steps=100000", "--config.checkpoint.every=50"
    run = self.start(*endless, processes=2)
    self.assertTrue(
      run.wait_for(lambda: len(steps.list_steps(str(run.workdir))) > 1)
    )
    run.processes[victim].send_signal(signal.SIGKILL)
    self.assertNotEqual(run.processes[1 - victim].wait(200), 0)
    self.assertEqual(
      steps.find_damage(
        str(run.workdir), steps.list_steps(str(run.workdir))[-1]
      ),
      {},
    )
