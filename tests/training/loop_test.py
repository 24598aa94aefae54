"""The training run: resumed bit for bit, errors before work, failed saves.

What holds for every family is tested with the one that compiles fastest.
"""

import errno
import json
import os
import pathlib
import shutil
import signal
from unittest import mock

import chex
import filelock
import grain
import jax
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental.compilation_cache import compilation_cache

from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.mesh import make_mesh
from moh_jax.training import entrance, flops
from moh_jax.training.metrics import Log
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.task import stream
from moh_jax.training.train import train
from tests import folders
from tests.data.tiny_images import put
from tests.training import tiny
from tests.two_processes import python

# The average stays behind the parameters.
_OPTIM = {"ema_decay": 0.999, "lr": 0.1, "accumulation": 2}
_KILLED = """
import os, pathlib, signal, sys, time
from moh_jax.training.metrics import Log
from tests.training import loop_test, tiny

def die(log, step, metrics):
  if step == 4:  # step 2 is being saved in the background
    while not pathlib.Path(sys.argv[1], "checkpoints/2").exists():
      time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

with tiny.before(Log, "step", die):
  loop_test.run(sys.argv[1])
"""


def _config(**sections):
  return tiny.llm_config(**{"optim": _OPTIM, "eval": {"every": 2}, **sections})


def run(workdir, **sections):
  """The run of these tests, of 4 steps, with fields of sections changed."""
  return tiny.train(_config(**sections), workdir)


class LoopTest(folders.FolderTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.whole = cls.shared_folder() / "whole"
    with cls().assertLogs("moh_jax", "INFO") as logs:
      cls.result = run(cls.whole)
    cls.said = [record.getMessage() for record in logs.records]

  def _copy(self) -> pathlib.Path:
    """A directory of its own where the run of 4 steps has finished."""
    return shutil.copytree(self.whole, self.root / "copy")

  def _check_goes_on(self, workdir):
    """Started again, the run ends as the one that nothing disturbed."""
    again = run(workdir)
    chex.assert_trees_all_equal(again.state, self.result.state)
    self.assertEqual(again.evaluation, self.result.evaluation)
    self.assertEqual(tiny.rows(workdir), tiny.rows(self.whole))

  def test_writes_a_row_per_step_and_split_and_says_what_is_trained(self):
    rows = tiny.rows(self.whole)
    self.assertCountEqual(
      [(row["step"], row["split"]) for row in rows],
      [(s, split) for s in (1, 2, 3, 4) for split in ("train", "heads")]
      + [(2, "val"), (4, "val")],
    )
    wanted = {"loss", "balance_loss", "activated_share", "lr"}
    self.assertContainsSubset(wanted, rows[0])
    heads = next(row for row in rows if row["split"] == "heads")
    for layer in ("blocks0.0", "blocks0.1"):  # two of three routed heads
      self.assertAlmostEqual(sum(heads[layer]), 2.0, delta=0.002)
    count = sum(x.size for x in jax.tree.leaves(self.result.state.params))
    self.assertEqual(
      [line.partition(":")[0].partition(" ")[0] for line in self.said],
      ["data", "data", "devices", "model", "steps", "compiling", "compiled"],
    )
    self.assertEndsWith(self.said[3], f"heads active, {count:,} parameters")

  def test_says_how_often_it_reads_the_training_examples(self):
    config = tiny.config(data={"batch_size": 16}, train={"steps": 4})
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    for count, level, told in (
      (10, "WARNING", "the 10 training examples 6.4 times, some in one batch"),
      (32, "INFO", "the 32 training examples 2 times"),
    ):
      with self.assertLogs("moh_jax", level) as logs:
        stream(config, grain.MapDataset.range(count), mesh, count)
      self.assertEndsWith(logs.output[0], told)

  @pytest.mark.integration
  def test_keeps_last_and_every_and_another_seed_is_another_run(self):
    saves = {"every": 1, "keep_last": 1, "keep_every": 2}
    run(self.root, train={"steps": 5, "seed": 1}, checkpoint=saves)
    self.assertEqual(steps.list_steps(self.root), [2, 4, 5])
    ours, theirs = tiny.losses(self.root), tiny.losses(self.whole)
    self.assertGreater(abs(ours[0] - theirs[0]), 1e-3)

  def test_evaluation_uses_the_averaged_parameters(self):
    raw = run(self._copy(), eval={"use_ema": False})
    losses = [run.evaluation["loss"] for run in (self.result, raw)]
    self.assertFalse(np.isclose(losses[0], losses[1], rtol=1e-2))

  @pytest.mark.integration
  def test_what_does_not_fit_is_refused(self):
    (self.root / "file").touch()
    mesh = {"mesh": {"data": 8}}
    for name, message, config in (
      ("run", "data.batch_size=8 .* 16", _config(**mesh)),
      ("run", "10 classes .* model.num_classes=7",
       tiny.config(**mesh, model={"num_classes": 7})),
      ("file/run", "workdir .*file/run cannot", tiny.llm_config(**mesh)),
    ):  # fmt: skip
      with self.assertRaisesRegex((ValueError, OSError), message):
        train(config, str(self.root / name))

  @parameterized.parameters(
    ({"train": {"seed": 1}, "data": {"batch_size": 16}},
     r"data\.batch_size: 16 here, 8 there; train\.seed: 1 here, 0 there\. .*"
     r"optim\.accumulation .* train\.init_from="),
    ({"optim": {"ema_decay": 0.0}}, "optim.ema_decay: False here, True there"),
    ({"data": {"fake_examples": 21}}, "'fake': examples: 21 here, 20 there"),
    ({}, "jax_threefry_partitionable: False here, None there"),
  )  # fmt: skip
  def test_another_run_cannot_continue(self, sections, message):
    if not sections:
      self.enterContext(jax.threefry_partitionable(False))
    with self.assertRaisesRegex(ValueError, message):
      run(self._copy(), **sections)

  def test_fewer_steps_than_are_done_are_nothing_to_do(self):
    with self.assertLogs("moh_jax", "WARNING") as logs:
      done = run(self._copy(), train={"steps": 2})
    self.assertTrue(done.finished)
    self.assertEqual(int(done.state.step), 4)
    self.assertIn("nothing to do: 4 steps are done", logs.output[-1])

  def test_a_model_is_no_run_that_goes_on(self):
    metadata = checkpoint.Metadata(_config().scheduled(), ())
    checkpoint.save_params(self.root, {"w": np.zeros(1)}, metadata)
    with self.assertRaisesRegex(ValueError, "a model, not a run.*init_from="):
      run(self.root)

  @pytest.mark.integration
  def test_what_may_change_in_a_continued_run_is_said(self):
    with self.assertLogs("moh_jax", "INFO") as logs:
      longer = run(self._copy(), train={"steps": 5}, model={"remat": "full"})
    self.assertEqual(int(longer.state.step), 5)
    said = "\n".join(logs.output)
    self.assertRegex(
      said, r"from step 4 on, changed: model.remat: .*; train.steps: 5 here, 4"
    )
    self.assertIn("resumed from step 4 of 5 in ", said)

  def test_finished_run_started_again_only_evaluates(self):
    with mock.patch.object(Log, "step", side_effect=AssertionError):
      self._check_goes_on(self._copy())

  @parameterized.parameters(2, 3)  # there is an evaluation after step 2
  @pytest.mark.integration
  def test_run_stopped_by_sigterm_resumes_bit_identically(self, last):
    def stop(log, step, metrics):
      if step == last:
        os.kill(os.getpid(), signal.SIGTERM)

    with tiny.before(Log, "step", stop):
      self.assertFalse(run(self.root).finished)
    self.assertEqual(steps.find_step(self.root, None), last)
    self.assertLen(tiny.rows(self.root, "val"), last - 2)
    self._check_goes_on(self.root)

  def test_run_killed_by_sigkill_resumes_bit_identically(self):
    status, _, err = python("-c", _KILLED, self.root)
    self.assertEqual(status, -signal.SIGKILL, err)
    self.assertEqual(steps.find_step(self.root, None), 2)
    self._check_goes_on(self.root)

  @parameterized.parameters(
    ("vit", {}),
    ("dit", {}),
    ("llm", {"name": "muon", "moment_dtype": "bfloat16"}),
    ("llm", {"name": "adafactor", "moment_dtype": "bfloat16"}),
  )
  @pytest.mark.integration
  def test_run_of_every_family_and_state_resumes_bit_identically(
    self, family, optim
  ):
    optim = {"ema_decay": 0.9, "accumulation": 2, **optim}
    config = tiny.CONFIGS[family](model=tiny.ALIKE[family], optim=optim)
    whole, rows = tiny.train(config, self.root), tiny.rows(self.root)
    shutil.rmtree(self.root / "checkpoints/4")
    again = tiny.train(config, self.root)
    chex.assert_trees_all_equal(again.state, whole.state)
    self.assertEqual(tiny.rows(self.root), rows)

  @pytest.mark.integration
  def test_damaged_step_is_stepped_over_and_kept(self):
    workdir = self._copy()
    file = workdir / "checkpoints/4/data/metadata"
    first, *rest = file.read_bytes()
    file.write_bytes(bytes([first ^ 1, *rest]))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self._check_goes_on(workdir)
    self.assertIn("step 4: damaged, item data, file metadata", logs.output[0])
    self.assertIn("using the checkpoint of step 2 instead", logs.output[1])
    self.assertTrue((workdir / "checkpoints/damaged/4.1").is_dir())

  def test_run_without_a_whole_checkpoint_does_not_begin_anew(self):
    workdir = self._copy()
    for step in (2, 4):
      (workdir / f"checkpoints/{step}" / steps.MANIFEST).unlink()
    with self.assertRaisesRegex(
      steps.DamagedCheckpointError, "step 4: .*missing; step 2: .*missing"
    ):
      run(workdir)
    self.assertEqual(steps.list_steps(workdir), [2, 4])

  def test_second_run_is_refused(self):
    lock = filelock.FileLock(self.root / "run.lock")
    with lock, self.assertRaisesRegex(OSError, f"{self.root} belongs to a run"):
      run(self.root)

  @pytest.mark.integration
  def test_what_fails_in_a_run_ends_it_in_one_line_with_the_last_step(self):
    def full(folder):
      if folder.name.startswith("4"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "d/0")

    workdir, last = self.root / "run", "; the last whole checkpoint in .* is st"
    with (
      tiny.before(steps, "write_manifest", full),
      self.assertRaisesRegex(
        OSError,
        "^the checkpoint before cannot be written: .*No space left on device: "
        f"'d/0'{last}ep 2$",
      ),
    ):
      run(workdir, train={"steps": 6})
    shutil.rmtree(workdir)
    always, high = {"every": 1}, {"lr": 1e9, "warmup_steps": 0}
    with self.assertRaisesRegex(
      NonFiniteLossError, rf"=(nan|inf) at step 2{last}ep 1$"
    ):
      run(workdir, optim=high, checkpoint=always)
    self.assertEqual(steps.find_step(workdir, None), 1)

  @pytest.mark.integration
  def test_broken_image_ends_a_run_in_one_line_that_names_it(self):
    for split in ("train", "val"):
      names = (f"{split}/{label}/{i}.png" for label in "ab" for i in range(4))
      *_, file = put(self.root, *names, size=(8, 8))
    cut = self.root / "train/b/3.png"
    cut.write_bytes(file.read_bytes()[:60])  # its header is whole
    where = {"source": "image_folder", "path": str(self.root)}
    config = tiny.config(
      model={**tiny.ALIKE["vit"], "num_classes": 2},
      data={**where, "batch_size": 2, "augment": "none"},
      checkpoint={"every": 1},
    )
    with self.assertRaisesRegex(
      ValueError, rf"^{cut}: damaged image.*; .* checkpoint[^\n]*$"
    ):
      tiny.train(config, self.root / "run")

  @pytest.mark.integration
  def test_run_writes_mfu_and_a_trace_and_keeps_its_programs(self):
    kept = str(self.root / "programs")
    for name in ("cache_dir", "cache_max_size"):
      name = f"jax_compilation_{name}"
      before = getattr(jax.config, name)
      self.addCleanup(jax.config.update, name, before)
    self.addCleanup(compilation_cache.reset_cache)
    with mock.patch.object(flops, "published_peak", return_value=1e12):
      log = {"every": 2, "profile": (2, 4), "tensorboard": False}
      run(self.root, log=log, train={"compilation_cache": kept})
    # Without a limit, so that processes need no lock.
    self.assertEqual(jax.config.jax_compilation_cache_max_size, -1)
    self.assertNotEmpty(list(pathlib.Path(kept).glob("*-cache")))
    lines = (self.root / "metrics.jsonl").read_text().splitlines()
    rows = [r for r in map(json.loads, lines) if r["split"] == "train"]
    self.assertEqual([row["step"] for row in rows], [2, 4])
    self.assertGreater(min(row["mfu"] for row in rows), 0)
    (trace,) = (self.root / "profile").rglob("*.xplane.pb")
    self.assertIn(b"step_num", trace.read_bytes())

  def test_missing_wandb_is_refused_before_the_run(self):
    with mock.patch.object(
      entrance.importlib.util, "find_spec", return_value=None
    ):
      with self.assertRaisesRegex(ValueError, "log.wandb='p' needs .* wandb"):
        run("/nonexistent/run", log={"wandb": "p"})
