"""Runs that are killed or stopped at any moment end as runs that are not.

`MOH_JAX_FAULTS_KILLS` and `MOH_JAX_FAULTS_PAIR_KILLS` say how often one process
and one of two are killed, `MOH_JAX_FAULTS_SEED` when.
"""

import os
import random
import signal
import time

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import RunsTest, differences

pytestmark = pytest.mark.faults

_KILLS = int(os.environ.get("MOH_JAX_FAULTS_KILLS", "12"))
_PAIR_KILLS = int(os.environ.get("MOH_JAX_FAULTS_PAIR_KILLS", "4"))
_SEED = int(os.environ.get("MOH_JAX_FAULTS_SEED", "0"))
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAVE_ALWAYS = "--config.checkpoint.every=1"
_LONG = "--config.train.steps=100000"


class KillsTest(RunsTest):
  @parameterized.parameters((1, _KILLS, 0.0), (2, _PAIR_KILLS, 1e-6))
  def test_one_of_the_processes(self, processes, kills, rtol):
    rng, left = random.Random(_SEED + processes), kills
    whole = self.finished(_SAVE_ALWAYS, processes=processes)
    while left > 0:
      workdir, ended = "", False
      while not ended:
        run = self.start(_SAVE_ALWAYS, workdir=workdir, processes=processes)
        workdir = run.workdir
        # Few while it compiles, most among steps and saves, however long a
        # busy machine compiles.
        phase = rng.choice(("compiling", *["compiled in"] * 4))
        if left > 0 and run.wait_for_text(phase):
          time.sleep(rng.uniform(0, 3))
        victim = rng.choice(run.processes)
        if left > 0 and victim.poll() is None:
          victim.send_signal(signal.SIGKILL)
          left -= 1
          run.wait(200)
        else:
          self.assertEqual(run.wait(), 0, run.said())
        if processes == 1:  # JAX ends the others with a stack of its own
          self.assertNotIn("Traceback", run.said())
        self.check_newest(workdir)
        ended = run.processes[0].returncode == 0
      self.assertEqual(differences(workdir, whole, rtol), [])
      print(f"{kills - left} kills of one of {processes}, the same run")

  @parameterized.parameters(0, 1)
  def test_other_process_ends_too(self, victim):
    """By JAX's own watch, after 100 seconds at most."""
    run = self.start(_LONG, "--config.checkpoint.every=50", processes=2)
    self.assertTrue(
      run.wait_for(lambda: len(steps.list_steps(run.workdir)) > 1)
    )
    run.processes[victim].send_signal(signal.SIGKILL)
    self.assertNotEqual(run.processes[1 - victim].wait(200), 0)
    self.check_newest(run.workdir)


class SignalsTest(RunsTest):
  @parameterized.product(
    number=_SIGNALS, after=("data: fake, train", "model: ", "compiling")
  )
  def test_before_the_first_step_one_line(self, number, after):
    compiles = after == "compiling"
    run = self.start(family="llm" if compiles else "llm-waits")
    self.assertTrue(run.wait_for_text(after))
    run.processes[0].send_signal(number)
    status = run.wait(60)
    self.assertEqual(status, 128 + number, run.said())
    if "saved" in run.said():  # it compiled, or JAX dropped the exception
      self.assertIn("stopped at step 1, saved", run.said())
    else:
      stopped = f"stopped by {signal.Signals(number).name}"
      self.assertIn(stopped, run.error())
    self.check_newest(run.workdir)

  def test_stopped_at_any_moment_and_resumed_the_run_is_the_same(self):
    whole = self.finished(_SAVE_ALWAYS)
    rng, workdir = random.Random(0), ""
    for attempt in range(6):
      run = self.start(_SAVE_ALWAYS, workdir=workdir)
      workdir = run.workdir
      if run.wait_for_text("compiled in"):
        time.sleep(rng.uniform(0, 2))
        run.processes[0].send_signal(_SIGNALS[attempt % 2])
      # Negative: the signal came while Python ended.
      statuses = {s for n in _SIGNALS for s in (0, 128 + n, -n)}
      self.assertIn(run.wait(60), statuses)
      self.assertNotIn("Traceback", run.said())
      self.check_newest(workdir)
    self.finished(_SAVE_ALWAYS, workdir=workdir)
    self.assertEqual(differences(workdir, whole), [])

  @parameterized.parameters(*_SIGNALS)
  def test_second_signal_ends_at_once_without_harm(self, number):
    run = self.start(_SAVE_ALWAYS, _LONG)
    self.assertTrue(run.wait_for_step(3))
    run.processes[0].send_signal(number)
    time.sleep(0.01)
    run.processes[0].send_signal(number)
    self.assertIn(run.wait(60), (0, 128 + number), run.said())
    self.check_newest(run.workdir)
    again = self.start(_SAVE_ALWAYS, _LONG, workdir=run.workdir)
    self.assertTrue(again.wait_for_text("resumed from"))

  @parameterized.parameters(0, 1)
  def test_sigterm_of_one_process_saves_everywhere(self, victim):
    run = self.start(_LONG, processes=2)
    self.assertTrue(run.wait_for_step(3))
    run.processes[victim].send_signal(signal.SIGTERM)
    self.assertEqual(
      [p.wait(60) for p in run.processes], [143, 143], run.said()
    )
    for index in (0, 1):
      self.assertIn("saved; run again to resume", run.said(index))
