"""Runs that are killed at any moment end as runs that are not.

`MOH_JAX_FAULTS_KILLS` and `MOH_JAX_FAULTS_PAIR_KILLS` say how often one process
and one of two are killed, `MOH_JAX_FAULTS_SEED` when.
"""

import os
import pathlib
import random
import signal
import time

import pytest
from absl.testing import absltest

from moh_jax.runtime import steps
from tests.faults.runs import Run, differences

pytestmark = pytest.mark.faults

_KILLS = int(os.environ.get("MOH_JAX_FAULTS_KILLS", "12"))
_PAIR_KILLS = int(os.environ.get("MOH_JAX_FAULTS_PAIR_KILLS", "4"))
_SEED = int(os.environ.get("MOH_JAX_FAULTS_SEED", "0"))
_SAVE_ALWAYS = "--config.checkpoint.every=1"


class KillsTest(absltest.TestCase):
  def _dir(self) -> str:
    return os.path.join(self.create_tempdir().full_path, "run")

  def _whole(self, **options) -> str:
    """A run that nobody disturbs."""
    workdir = self._dir()
    run = Run(workdir, _SAVE_ALWAYS, **options)
    self.addCleanup(run.stop)
    self.assertEqual(run.wait(), 0, run.said())
    return workdir

  def _chain(self, rng: random.Random, kills: int, **options):
    """Starts a run again and again, killing it, until it finishes.

    Returns:
      The working directory, and how often a process was killed.
    """
    workdir, killed = self._dir(), 0
    while True:
      run = Run(workdir, _SAVE_ALWAYS, **options)
      self.addCleanup(run.stop)
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
          process.wait(90)
      else:
        self.assertEqual(run.wait(), 0, run.said())
      for index in range(len(run.processes)):
        self.assertNotIn("Traceback", run.said(index))
        self.assertNotIn("stack trace", run.said(index))
      # An older one may be half deleted.
      for step in steps.list_steps(workdir)[-1:]:
        self.assertEqual(steps.find_damage(workdir, step), {})
      if run.processes[0].returncode == 0:
        return workdir, killed

  def test_one_process(self):
    rng, whole, left = random.Random(_SEED), self._whole(), _KILLS
    while left > 0:
      workdir, killed = self._chain(rng, left)
      self.assertEqual(differences(workdir, whole), [])
      left -= killed
      print(f"{_KILLS - left} kills of one process, the same state and metrics")

  def test_one_of_two_processes(self):
    rng, left = random.Random(_SEED + 1), _PAIR_KILLS
    whole = self._whole(processes=2)
    while left > 0:
      workdir, killed = self._chain(rng, left, processes=2)
      self.assertEqual(differences(workdir, whole, rtol=1e-6), [])
      left -= killed
      print(f"{_PAIR_KILLS - left} kills of one of two, the same run")
    self.assertTrue(pathlib.Path(workdir, "metrics.jsonl").exists())
