"""Runs of two processes, and two runs in one working directory."""

import os
import re
import signal
import time

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import Run, RunsTest, differences, rows

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
        self.assertIn(f"process {first.processes[0].pid} on host", line)
        refused += 1
      self.assertEqual(first.wait(900), 0, first.said())
      self.assertEqual(differences(first.workdir, whole.workdir), [])


class ProcessesTest(RunsTest):
  @parameterized.parameters(
    ("train.seed=5", r"config.train.seed: 0 in process 0, 5 in process 1"),
    ("mesh.data=3", r"config.mesh.data: -?\d in process 0, 3 in process 1"),
  )  # a mesh that is impossible too
  def test_other_config_is_refused_with_the_difference(self, other, message):
    run = self.start(last=[f"--config.{other}"], processes=2)
    self.assertEqual(run.wait(), 2, run.said())
    for index in (0, 1):
      (line,) = run.errors(index)
      self.assertRegex(line, message)
    self.assertEqual(steps.list_steps(str(run.workdir)), [])

  @parameterized.parameters(0, 1)
  def test_sigterm_during_an_evaluation_saves_everywhere(self, victim):
    # The first evaluation, after step 3, would last for minutes.
    long = ("--config.eval.batch_size=2", "--config.data.fake_examples=400000")
    run = self.start(*long, "--config.eval.every=3", processes=2)
    self.assertTrue(run.wait_for_step(3))
    run.processes[victim].send_signal(signal.SIGTERM)
    self.assertEqual([p.wait(60) for p in run.processes], [0, 0], run.said())
    for index in (0, 1):
      self.assertIn("stopped at step 3, saved", run.said(index))
    self.assertNotIn((3, "val"), rows(run.workdir))
    self.assertEqual(steps.list_steps(str(run.workdir))[-1], 3)

  @parameterized.product(victim=(0, 1), number=(signal.SIGKILL, signal.SIGSTOP))
  def test_other_process_ends_with_one_line(self, victim, number):
    endless = "--config.train.steps=100000", "--config.checkpoint.every=50"
    run = self.start(*endless, processes=2)
    self.assertTrue(
      run.wait_for(lambda: len(steps.list_steps(str(run.workdir))) > 1)
    )
    run.processes[victim].send_signal(number)
    other = 1 - victim
    self.assertNotEqual(run.processes[other].wait(120), 0)
    self.assertNotIn("Traceback", run.said(other))
    self.assertNotIn("stack trace", run.said(other))
    # The line comes from a process of its own where this one was ended.
    deadline = time.monotonic() + 10
    while not run.errors(other) and time.monotonic() < deadline:
      time.sleep(0.02)
    (line,) = run.errors(other)
    named = int(
      re.search(r"last whole checkpoint in .* is step (\d+)", line)[1]
    )
    self.assertEqual(named, steps.newest_whole_step(str(run.workdir)))
