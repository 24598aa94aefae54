"""What a run does about damage, failed saves, other data and stops."""

import errno
import json
import os
import pathlib
import shutil
import signal
import tempfile
from unittest import mock

import chex
import jax
import orbax.checkpoint as ocp
from absl.testing import absltest, parameterized

from moh_jax.data import pipeline
from moh_jax.runtime import run_lock, steps
from moh_jax.training import language_modeling
from moh_jax.training.train import Log, train
from tests.training import tiny


def _config(**sections):
  return tiny.llm_config(**{"eval": {"every": 2}, **sections})


def _train(workdir, **sections):
  return train(_config(**sections), workdir, devices=jax.devices()[:1])


class FaultsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.whole = os.path.join(cls.root, "whole")
    cls.result = _train(cls.whole)

  def _copy(self) -> str:
    """A directory of its own where the run of 4 steps has finished."""
    copy = os.path.join(self.create_tempdir().full_path, "copy")
    return shutil.copytree(self.whole, copy)

  def _rows(self, workdir):
    with open(os.path.join(workdir, "metrics.jsonl")) as stream:
      rows = [json.loads(line) for line in stream]
    return [
      {k: v for k, v in row.items() if not tiny.is_time(k)} for row in rows
    ]

  def test_damaged_step_is_stepped_over_and_kept(self):
    workdir = self._copy()
    file = pathlib.Path(workdir, "checkpoints/4/data/metadata")
    file.write_bytes(file.read_bytes().replace(b"4", b"5", 1))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      again = _train(workdir)
    self.assertIn("step 4: damaged, item data, file metadata", logs.output[0])
    self.assertIn("using the checkpoint of step 2 instead", logs.output[1])
    self.assertTrue(
      os.path.isdir(os.path.join(workdir, "checkpoints", "damaged", "4.1"))
    )
    chex.assert_trees_all_equal(again.state, self.result.state)
    self.assertEqual(self._rows(workdir), self._rows(self.whole))

  def test_run_without_a_whole_checkpoint_does_not_begin_anew(self):
    workdir = self._copy()
    for step in (2, 4):
      pathlib.Path(workdir, f"checkpoints/{step}", steps.MANIFEST).unlink()
    with self.assertRaisesRegex(
      steps.DamagedCheckpointError, "step 4: .*missing; step 2: .*missing"
    ):
      _train(workdir)
    self.assertEqual(steps.list_steps(workdir), [2, 4])

  def test_other_data_are_refused_by_what_differs(self):
    other = {"fake": {"examples": 21}}
    pattern = "data 'fake': examples 21 here, 20 there"
    with mock.patch.object(
      language_modeling.sequences.Text, "identity", return_value=other
    ):
      with self.assertRaisesRegex(ValueError, pattern):
        _train(self._copy(), train={"steps": 6})

  def test_second_run_is_refused(self):
    workdir = self._copy()
    lock = run_lock.RunLock(workdir)
    lock.take()
    self.addCleanup(lock.release)
    # A lock belongs to an open file, so one process may try a second time.
    with self.assertRaisesRegex(run_lock.RunningError, "belongs to a run"):
      _train(workdir)

  @parameterized.parameters(True, False)
  def test_failed_save_stops_the_run_at_the_next_step(self, in_background):
    workdir = self.create_tempdir().full_path
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "d/0")
    write = steps.write_manifest

    def fail(folder):
      if folder.name.startswith("4"):
        raise full
      write(folder)

    with mock.patch.object(steps, "write_manifest", fail):
      with self.assertRaisesRegex(
        OSError,
        "^the checkpoint of step 4 cannot be written: No space left on device: "
        "d/0; the last whole checkpoint in .* is step 2$",
      ):
        _train(
          workdir,
          train={"steps": 6},
          checkpoint={"every": 2, "async_save": in_background},
        )
    folder = os.path.join(workdir, "checkpoints")
    self.assertEqual(os.listdir(folder), ["2"])  # no remains
    again = _train(workdir)
    chex.assert_trees_all_equal(again.state, self.result.state)

  def test_run_may_go_on_after_a_failed_save(self):
    workdir = self.create_tempdir().full_path
    options = {"every": 2, "on_error": "continue"}
    write = steps.write_manifest

    def fail(folder):
      if folder.name.startswith("2"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      write(folder)

    with (
      mock.patch.object(steps, "write_manifest", fail),
      self.assertLogs("moh_jax", "WARNING") as logs,
    ):
      result = _train(workdir, checkpoint=options)
    self.assertIn("checkpoint of step 2 cannot be written", logs.output[0])
    self.assertEqual(steps.list_steps(workdir), [4])
    chex.assert_trees_all_equal(result.state, self.result.state)

  def test_space_is_checked_before_a_save(self):
    workdir = self.create_tempdir().full_path
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    with (
      mock.patch.object(shutil, "disk_usage", return_value=usage),
      mock.patch.object(ocp.CheckpointManager, "save") as save,
    ):
      with self.assertRaisesRegex(OSError, r"it needs 0.\d MB, .* has 0.0 MB"):
        _train(workdir)
    save.assert_not_called()

  def test_bad_data_end_a_run_that_names_its_last_checkpoint(self):
    workdir = self.create_tempdir().full_path
    read = pipeline.TrainBatches.__next__

    def fail(batches):
      if batches.position == 3:
        raise ValueError("a/b.png is damaged")
      return read(batches)

    pattern = r"^a/b.png is damaged; the last whole checkpoint .* is step 2$"
    with mock.patch.object(pipeline.TrainBatches, "__next__", fail):
      with self.assertRaisesRegex(ValueError, pattern):
        _train(workdir)

  def test_stop_ends_an_evaluation_which_the_resumed_run_does(self):
    workdir = self.create_tempdir().full_path
    evaluate = Log._scores

    def stop(run, state):
      os.kill(os.getpid(), signal.SIGTERM)
      return evaluate(run, state)

    with mock.patch.object(Log, "_scores", stop):
      stopped = _train(workdir)
    self.assertFalse(stopped.finished)
    self.assertEqual(steps.list_steps(workdir), [2])
    self.assertNotIn(
      (2, "val"), [(r["step"], r["split"]) for r in self._rows(workdir)]
    )
    again = _train(workdir)
    chex.assert_trees_all_equal(again.state, self.result.state)
    self.assertEqual(self._rows(workdir), self._rows(self.whole))


if __name__ == "__main__":
  absltest.main()
