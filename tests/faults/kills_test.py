"""Runs that are killed at any moment end as runs that are not.

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
_SAVE_ALWAYS = "--config.checkpoint.every=1"
_SEED = int(os.environ.get("MOH_JAX_FAULTS_SEED", "0"))


class KillsTest(RunsTest):
  def _chain(self, rng: random.Random, kills: int, processes: int):
    """Starts a run again and again, killing it, until it finishes.

    Returns:
      The working directory, and how often a process was killed.
    """
    workdir, killed = "", 0
    while True:
      run = self.start(_SAVE_ALWAYS, workdir=workdir, processes=processes)
      workdir = str(run.workdir)
      if killed < kills:
        # Few while it compiles, most among steps and saves, however long a
        # busy machine compiles.
        phase = rng.choice(("compiling", *["compiled in"] * 4))
        if run.wait_for(lambda run=run, phase=phase: phase in run.said()):
          time.sleep(rng.uniform(0, 3))
      victim = rng.choice(run.processes)
      if killed < kills and victim.poll() is None:
        victim.send_signal(signal.SIGKILL)
        killed += 1
        for process in run.processes:
          process.wait(200)
      else:
        self.assertEqual(run.wait(), 0, run.said())
      if processes == 1:  # JAX ends the others with a stack of its own
        self.assertNotIn("Traceback", run.said())
      # An older one may be half deleted.
      for step in steps.list_steps(workdir)[-1:]:
        self.assertEqual(steps.find_damage(workdir, step), {})
      if run.processes[0].returncode == 0:
        return workdir, killed

  @parameterized.parameters((1, _KILLS, 0.0), (2, _PAIR_KILLS, 1e-6))
  def test_one_of_the_processes(self, processes, kills, rtol):
    rng, left = random.Random(_SEED + processes), kills
    whole = self.finished(_SAVE_ALWAYS, processes=processes).workdir
    while left > 0:
      workdir, killed = self._chain(rng, left, processes)
      self.assertEqual(differences(workdir, whole, rtol), [])
      left -= killed
      print(f"{kills - left} kills of one of {processes}, the same run")
