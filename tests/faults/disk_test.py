"""Disks that are full, small or read-only: one line, and nothing lost."""

import os
import subprocess

import pytest
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests.faults.runs import RunsTest, differences, rows

pytestmark = pytest.mark.faults

_SAVE_OFTEN = "--config.checkpoint.every=2"


def _mount(folder: str, size: str) -> bool:
  """Makes a folder a file system of its own; False where that is forbidden."""
  argv = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
  return subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 0


class DiskTest(RunsTest):
  def _small(self, size: str) -> str:
    folder = self.create_tempdir().full_path
    if not _mount(folder, size):
      self.skipTest("may not mount a file system")
    self.addCleanup(subprocess.run, ["umount", "-l", folder], check=True)
    return os.path.join(folder, "run")

  def _fails(self, *options: str, **more: str) -> str:
    """The one line of a run that cannot write."""
    run = self.start(_SAVE_OFTEN, *options, **more)
    self.assertEqual(run.wait(), 2, run.said())
    return run.error()

  @parameterized.parameters("450k", "600k", "800k", "1100k")
  def test_small_file_system(self, size):
    workdir = self._small(size)
    line = self._fails("--config.train.steps=40", workdir=workdir)
    self.assertRegex(line, "cannot be written: ")
    if not steps.list_steps(workdir):
      self.assertIn("holds no checkpoint", line)
      return
    last = steps.newest_whole_step(workdir)
    said = f"the last whole checkpoint in {workdir} is step {last}"
    self.assertIn(said, line)
    taken = max(step for step, _ in rows(workdir))
    self.assertLessEqual(taken, last + 2 + 2)  # the failed save is last + 2

  def test_limit_of_file_sizes(self):
    line = self._fails(shell="ulimit -f 12")  # 12 KiB
    self.assertRegex(line, "checkpoint .* cannot be written: .*File too large")

  def test_run_goes_on_from_the_last_whole_step_when_there_is_space(self):
    whole = self.finished(_SAVE_OFTEN)
    workdir = self._small("800k")
    self._fails(workdir=workdir)
    argv = ["mount", "-o", "remount,size=50M", os.path.dirname(workdir)]
    subprocess.run(argv, check=True)
    self.finished(_SAVE_OFTEN, workdir=workdir)
    self.assertEqual(differences(workdir, whole), [])
