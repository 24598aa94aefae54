"""SIGTERM and SIGINT in every phase of a run, and a second one."""

import random
import signal
import time

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import Run, RunsTest, differences

pytestmark = pytest.mark.faults

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_SAVE_ALWAYS = "--config.checkpoint.every=1"
_LONG = "--config.train.steps=100000"


class SignalsTest(RunsTest):
  def _check(self, run: Run) -> None:
    self.assertNotIn("Traceback", run.said())
    for step in steps.list_steps(str(run.workdir))[-1:]:
      self.assertEqual(steps.find_damage(str(run.workdir), step), {})

  @parameterized.product(
    number=_NUMBERS, after=("data: fake, train", "model: ", "compiling")
  )
  def test_before_the_first_step_one_line(self, number, after):
    compiles = after == "compiling"
    run = self.start(family="llm" if compiles else "llm-waits")
    self.assertTrue(run.wait_for(lambda: after in run.said()))
    run.processes[0].send_signal(number)
    status = run.wait(60)
    if compiles and not status:  # it was done, or JAX dropped the exception
      self.assertIn("stopped at step 1, saved", run.said())
    else:
      self.assertEqual(status, 128 + number, run.said())
      (line,) = run.errors()
      self.assertIn(f"stopped by {signal.Signals(number).name}", line)
    self._check(run)

  def test_stopped_at_any_moment_and_resumed_the_run_is_the_same(self):
    whole = self.finished(_SAVE_ALWAYS)
    rng, stops, workdir = random.Random(0), 0, ""
    for attempt in range(6):
      run = self.start(_SAVE_ALWAYS, workdir=workdir)
      workdir = str(run.workdir)
      if run.wait_for(lambda run=run: "compiled in" in run.said()):
        time.sleep(rng.uniform(0, 2))
        run.processes[0].send_signal(_NUMBERS[attempt % 2])
        stops += 1
      # Negative: the signal came while Python ended.
      self.assertIn(
        run.wait(60), {0, *(128 + n for n in _NUMBERS), *(-n for n in _NUMBERS)}
      )
      self._check(run)
    self.finished(_SAVE_ALWAYS, workdir=workdir)
    self.assertEqual(differences(workdir, whole.workdir), [])
    print(f"{stops} stops, the same state and metrics")

  @parameterized.parameters(*_NUMBERS)
  def test_second_signal_ends_at_once_without_harm(self, number):
    run = self.start(_SAVE_ALWAYS, _LONG)
    self.assertTrue(run.wait_for_step(3))
    run.processes[0].send_signal(number)
    time.sleep(0.01)
    run.processes[0].send_signal(number)
    self.assertIn(run.wait(60), (0, 128 + number), run.said())
    self._check(run)
    again = self.start(_SAVE_ALWAYS, _LONG, workdir=str(run.workdir))
    self.assertTrue(again.wait_for(lambda: "resumed from" in again.said()))
