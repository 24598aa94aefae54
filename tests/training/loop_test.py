"""The training run: reproducible, errors before work, damage, failed saves.

What holds for every family is tested with the one that compiles fastest.
"""

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
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest, parameterized

from moh_jax.config import RouterConfig
from moh_jax.data import pipeline
from moh_jax.runtime import run_lock, steps
from moh_jax.training import language_modeling
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import Log, train
from tests.training import tiny

# The average stays behind the parameters.
_OPTIM = {"ema_decay": 0.999, "lr": 0.1}


def _config(**sections):
  return tiny.llm_config(**{"optim": _OPTIM, "eval": {"every": 2}, **sections})


def _train(workdir, config=None, **sections):
  config = config or _config(**sections)
  return train(config, workdir, devices=jax.devices()[:1])


def _rows(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [{k: v for k, v in row.items() if not tiny.is_time(k)} for row in rows]


class _RunTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.whole = os.path.join(cls.root, "whole")
    with cls().assertLogs("moh_jax", "INFO") as logs:
      cls.result = _train(cls.whole)
    cls.said = [record.getMessage() for record in logs.records]

  def _dir(self) -> str:
    return self.create_tempdir().full_path

  def _copy(self) -> str:
    """A directory of its own where the run of 4 steps has finished."""
    return shutil.copytree(self.whole, os.path.join(self._dir(), "copy"))


class LoopTest(_RunTest):
  def test_same_seed_gives_the_same_run_and_another_differs(self):
    first = self.result.state.params
    again, other = (
      _train(self._dir(), train={"seed": seed}).state.params for seed in (0, 1)
    )
    chex.assert_trees_all_equal(first, again)
    kernels = [run["head"]["kernel"] for run in (first, other)]
    self.assertGreater(float(abs(kernels[0] - kernels[1]).max()), 1e-3)

  def test_writes_a_row_per_step_and_split_and_says_what_is_trained(self):
    rows = _rows(self.whole)
    self.assertCountEqual(
      [(row["step"], row["split"]) for row in rows],
      [(s, "train") for s in (1, 2, 3, 4)]
      + [(2, "val"), (4, "val"), (4, "heads")],
    )
    wanted = {"loss", "balance_loss", "activated_share", "lr"}
    self.assertContainsSubset(wanted, rows[0])
    count = sum(x.size for x in jax.tree.leaves(self.result.state.params))
    for start, line in zip(
      (
        "data: fake, train: ",
        "data: fake, val: ",
        "devices: 1 x cpu, processes: 1, mesh: data=1, ",
        "model: llm, 2 layers of width ",
        "compiling the training step",
        "compiled in ",
      ),
      self.said,
      strict=True,
    ):
      self.assertStartsWith(line, start)
    self.assertEndsWith(self.said[3], f"heads active, {count:,} parameters")

  def test_keeps_last_and_every(self):
    workdir = self._dir()
    saves = {"every": 1, "keep_last": 1, "keep_every": 2}
    _train(workdir, train={"steps": 5}, checkpoint=saves)
    folders = os.listdir(os.path.join(workdir, "checkpoints"))
    self.assertCountEqual(folders, ["2", "4", "5"])

  def test_nonfinite_loss_names_step_and_last_checkpoint(self):
    workdir = self._dir()
    pattern = r"=(nan|inf) at step 2; the last whole checkpoint .* is step 1$"
    with self.assertRaisesRegex(NonFiniteLossError, pattern):
      _train(
        workdir,
        optim={"lr": 1e9, "warmup_steps": 0},
        checkpoint={"every": 1},
      )
    self.assertEqual(steps.find_step(workdir, None), 1)

  @parameterized.parameters(
    ({"model": {"top_k": (1, 2)}}, r"model\.top_k: \(1, 2\) here"),
    (
      {"train": {"seed": 1}, "data": {"batch_size": 16}},
      r"train\.seed: 1 here, 0 there; data\.batch_size: 16 here",
    ),
    ({"data": {"sequence_length": 8}}, "data.sequence_length: 8 here, 16"),
    ({"train": {"steps": 2}}, r"step 4, beyond train\.steps=2"),
  )
  def test_another_run_cannot_continue(self, sections, message):
    with self.assertRaisesRegex(ValueError, message):
      _train(self._copy(), **sections)

  def test_what_may_change_in_a_continued_run_is_said(self):
    with self.assertLogs("moh_jax", "INFO") as logs:
      longer = _train(self._copy(), train={"steps": 5}, model={"remat": "full"})
    self.assertEqual(int(longer.state.step), 5)
    changed = (
      r"from step 4 on, changed: model.remat: .*; train.steps: 5 here, 4"
    )
    said = "\n".join(logs.output)
    self.assertRegex(said, changed)
    self.assertIn("resumed from step 4 in ", said)

  def test_what_does_not_fit_is_refused(self):
    parts = {"accumulation": 4}
    file = self.create_tempfile().full_path
    for config, workdir, error, message in (
      (
        tiny.config(mesh={"data": 8}, optim=parts),
        self._dir(),
        *(ValueError, "data.batch_size=16 .* 32"),
      ),
      (
        tiny.config(mesh={"data": 3}),
        self._dir(),
        *(ValueError, "needs 3 devices, there are 8"),
      ),
      (
        _config(mesh={"data": 8}),
        f"{file}/run",
        *(OSError, f"workdir {file}/run cannot"),
      ),
      (
        tiny.config(mesh={"data": 8}, model={"num_classes": 7}),
        self._dir(),
        *(ValueError, "10 classes .* model.num_classes=7"),
      ),
      (
        _config(mesh={"data": 8}, model={"router": RouterConfig(top_p=0.5)}),
        self._dir(),
        *(ValueError, "top_p=0.5 must be 0 in training"),
      ),
    ):
      with self.assertRaisesRegex(error, message):
        train(config, workdir)

  def test_router_off_trains_the_baseline(self):
    off = {"router": RouterConfig("none")}
    model = {**tiny.ALIKE["vit"], **off}
    result = _train(self._dir(), tiny.config(model=model))
    self.assertEqual(result.evaluation["activated_share"], 1.0)

  def test_evaluation_uses_the_averaged_parameters(self):
    raw = _train(self._dir(), eval={"use_ema": False})
    chex.assert_trees_all_equal(raw.state.ema, self.result.state.ema)
    losses = [run.evaluation["loss"] for run in (self.result, raw)]
    self.assertFalse(np.isclose(losses[0], losses[1], rtol=1e-2))


class FaultsTest(_RunTest):
  def test_damaged_step_is_stepped_over_and_kept(self):
    workdir = self._copy()
    file = pathlib.Path(workdir, "checkpoints/4/data/metadata")
    file.write_bytes(file.read_bytes().replace(b"4", b"5", 1))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      again = _train(workdir)
    self.assertIn("step 4: damaged, item data, file metadata", logs.output[0])
    self.assertIn("using the checkpoint of step 2 instead", logs.output[1])
    aside = os.path.join(workdir, "checkpoints", "damaged", "4.1")
    self.assertTrue(os.path.isdir(aside))
    chex.assert_trees_all_equal(again.state, self.result.state)
    self.assertEqual(_rows(workdir), _rows(self.whole))

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
    with mock.patch.object(
      language_modeling.sequences.Text, "identity", return_value=other
    ):
      with self.assertRaisesRegex(
        ValueError, "data 'fake': examples 21 here, 20 there"
      ):
        _train(self._copy(), train={"steps": 6})

  def test_second_run_is_refused(self):
    workdir = self._copy()
    lock = run_lock.RunLock(workdir)
    lock.take()
    self.addCleanup(lock.release)
    # A lock belongs to an open file, so one process may try a second time.
    with self.assertRaisesRegex(run_lock.RunningError, "belongs to a run"):
      _train(workdir)

  def _failing_save(self, step):
    """Saves of a step find no space."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "d/0")
    write = steps.write_manifest

    def fail(folder):
      if folder.name.startswith(str(step)):
        raise full
      write(folder)

    return mock.patch.object(steps, "write_manifest", fail)

  @parameterized.parameters(True, False)
  def test_failed_save_stops_the_run_at_the_next_step(self, in_background):
    workdir = self._dir()
    with (
      self._failing_save(4),
      self.assertRaisesRegex(
        OSError,
        "^the checkpoint of step 4 cannot be written: No space left on device: "
        "d/0; the last whole checkpoint in .* is step 2$",
      ),
    ):
      saves = {"every": 2, "async_save": in_background}
      _train(workdir, train={"steps": 6}, checkpoint=saves)
    folder = os.path.join(workdir, "checkpoints")
    self.assertEqual(os.listdir(folder), ["2"])  # no remains
    again = _train(workdir)
    chex.assert_trees_all_equal(again.state, self.result.state)

  def test_run_may_go_on_after_a_failed_save(self):
    workdir = self._dir()
    options = {"every": 2, "on_error": "continue"}
    with (
      self._failing_save(2),
      self.assertLogs("moh_jax", "WARNING") as logs,
    ):
      result = _train(workdir, checkpoint=options)
    self.assertIn("checkpoint of step 2 cannot be written", logs.output[0])
    self.assertEqual(steps.list_steps(workdir), [4])
    chex.assert_trees_all_equal(result.state, self.result.state)

  def test_space_is_checked_before_a_save(self):
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    with (
      mock.patch.object(shutil, "disk_usage", return_value=usage),
      mock.patch.object(ocp.CheckpointManager, "save") as save,
    ):
      with self.assertRaisesRegex(OSError, r"it needs 0.\d MB, .* has 0.0 MB"):
        _train(self._dir())
    save.assert_not_called()

  def test_bad_data_end_a_run_that_names_its_last_checkpoint(self):
    read = pipeline.TrainBatches.__next__

    def fail(batches):
      if batches.position == 3:
        raise ValueError("a/b.png is damaged")
      return read(batches)

    pattern = r"^a/b.png is damaged; the last whole checkpoint .* is step 2$"
    with mock.patch.object(pipeline.TrainBatches, "__next__", fail):
      with self.assertRaisesRegex(ValueError, pattern):
        _train(self._dir())

  def test_stop_ends_an_evaluation_which_the_resumed_run_does(self):
    workdir = self._dir()
    evaluate = Log._scores

    def stop(run, state):
      os.kill(os.getpid(), signal.SIGTERM)
      return evaluate(run, state)

    with mock.patch.object(Log, "_scores", stop):
      stopped = _train(workdir)
    self.assertFalse(stopped.finished)
    self.assertEqual(steps.list_steps(workdir), [2])
    splits = [(row["step"], row["split"]) for row in _rows(workdir)]
    self.assertNotIn((2, "val"), splits)
    again = _train(workdir)
    chex.assert_trees_all_equal(again.state, self.result.state)
    self.assertEqual(_rows(workdir), _rows(self.whole))


if __name__ == "__main__":
  absltest.main()
