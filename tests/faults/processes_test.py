"""Runs of two processes, and two runs in one working directory."""

import os
import signal

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import Run, RunsTest, differences

pytestmark = pytest.mark.faults

_TIMES = int(os.environ.get("MOH_JAX_FAULTS_SECOND_RUNS", "50"))
_LONG = ("--config.train.steps=4000", "--config.checkpoint.every=50")


class TwoRunsTest(RunsTest):
  def test_second_run_is_refused_and_the_first_unharmed(self):
    whole = self.finished(*_LONG)
    refused = 0
    while refused < _TIMES:
      first = self.start(*_LONG)
      first.wait_for_step(1)
      while refused < _TIMES:
        second = Run(str(first.workdir), *_LONG, name="second")
        status = second.wait(60)
        if first.processes[0].poll() is not None:
          break  # it ended meanwhile, so that nothing was in the way
        self.assertEqual(status, 2)
        (line,) = second.errors()
        self.assertIn(f"{first.workdir} belongs to a run that is going", line)
        refused += 1
      self.assertEqual(first.wait(900), 0, first.said())
      self.assertEqual(differences(first.workdir, whole.workdir), [])


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
