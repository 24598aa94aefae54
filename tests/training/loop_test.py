"""The training run: reproducibility, errors before work, NaN, records.

What holds for every family is tested with the one that compiles fastest.
"""

import json
import os
import shutil
import tempfile

import chex
import jax
import numpy as np
from absl.testing import absltest

from moh_jax.config import Config, RouterConfig
from moh_jax.runtime import steps
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import Result, train
from tests.training import tiny

# The average stays behind the parameters.
_OPTIM = {"ema_decay": 0.999, "lr": 0.1}


def _config(**sections) -> Config:
  return tiny.llm_config(**{"optim": _OPTIM, **sections})


def _train(config: Config, workdir: str) -> Result:
  return train(config, workdir, devices=jax.devices()[:1])


class LoopTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.result = _train(_config(eval={"every": 2}), cls.workdir)

  def _dir(self) -> str:
    return self.create_tempdir().full_path

  def _copy(self) -> str:
    """The directory of the finished run of 4 steps, to continue."""
    copy = os.path.join(self._dir(), "copy")
    return shutil.copytree(self.workdir, copy)

  def test_same_seed_gives_the_same_run_and_another_differs(self):
    first = self.result.state.params
    again, other = (
      _train(_config(train={"seed": seed}), self._dir()).state.params
      for seed in (0, 1)
    )
    chex.assert_trees_all_equal(first, again)
    kernels = [run["head"]["kernel"] for run in (first, other)]
    self.assertGreater(float(abs(kernels[0] - kernels[1]).max()), 1e-3)

  def test_writes_a_row_per_step_and_split(self):
    with open(os.path.join(self.workdir, "metrics.jsonl")) as stream:
      rows = [json.loads(line) for line in stream]
    steps = [(row["step"], row["split"]) for row in rows]
    self.assertCountEqual(
      steps,
      [(s, "train") for s in (1, 2, 3, 4)]
      + [(2, "val"), (4, "val"), (4, "heads")],
    )
    self.assertLess(
      {"loss", "balance_loss", "activated_share", "lr"}, set(rows[0])
    )

  def test_says_at_once_what_is_trained(self):
    with self.assertLogs("moh_jax", "INFO") as logs:
      _train(_config(), self._dir())
    lines = [record.getMessage() for record in logs.records]
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
      lines,
      strict=True,
    ):
      self.assertStartsWith(line, start)
    self.assertEndsWith(lines[3], f"heads active, {count:,} parameters")

  def test_keeps_last_and_every(self):
    workdir = self._dir()
    saves = {"every": 1, "keep_last": 1, "keep_every": 2}
    _train(_config(train={"steps": 5}, checkpoint=saves), workdir)
    folders = os.listdir(os.path.join(workdir, "checkpoints"))
    self.assertCountEqual(folders, ["2", "4", "5"])

  def test_nonfinite_loss_names_step_and_last_checkpoint(self):
    config = _config(
      optim={"lr": 1e9, "warmup_steps": 0}, checkpoint={"every": 1}
    )
    workdir = self._dir()
    pattern = r"=(nan|inf) at step 2; the last whole checkpoint .* is step 1$"
    with self.assertRaisesRegex(NonFiniteLossError, pattern):
      _train(config, workdir)
    self.assertEqual(steps.find_step(workdir, None), 1)

  def test_other_models_checkpoint_is_refused_by_field(self):
    other = _config(model={"top_k": (1, 2)})
    with self.assertRaisesRegex(ValueError, r"model\.top_k: \(1, 2\) here"):
      _train(other, self._copy())

  def test_other_seed_or_batch_cannot_continue_a_run(self):
    other = _config(train={"seed": 1}, data={"batch_size": 16})
    pattern = r"train\.seed: 1 here, 0 there; data\.batch_size: 16 here"
    with self.assertRaisesRegex(ValueError, pattern):
      _train(other, self._copy())

  def test_run_beyond_its_steps_is_refused(self):
    with self.assertRaisesRegex(ValueError, "step 4, beyond train.steps=2"):
      _train(_config(train={"steps": 2}), self._copy())

  def test_runtime_fields_may_change_in_a_continued_run(self):
    longer = _config(train={"steps": 5}, model={"remat": "full"})
    self.assertEqual(int(_train(longer, self._copy()).state.step), 5)

  def test_batch_must_divide_over_mesh_and_microbatches(self):
    config = tiny.config(mesh={"data": 8}, optim={"accumulation": 4})
    with self.assertRaisesRegex(ValueError, "data.batch_size=16 .* 32"):
      train(config, self._dir())

  def test_mesh_must_fit_the_devices(self):
    config = tiny.config(mesh={"data": 3})
    with self.assertRaisesRegex(ValueError, "needs 3 devices, there are 8"):
      train(config, self._dir())

  def test_unwritable_workdir_is_named(self):
    file = self.create_tempfile().full_path
    with self.assertRaisesRegex(OSError, f"workdir {file}/run cannot"):
      _train(_config(), f"{file}/run")

  def test_classes_must_be_the_datas(self):
    config = tiny.config(model={"num_classes": 7})
    with self.assertRaisesRegex(
      ValueError, "10 classes .* model.num_classes=7"
    ):
      _train(config, self._dir())

  def test_router_off_trains_the_baseline(self):
    off = {"router": RouterConfig("none")}
    model = {**tiny.ALIKE["vit"], **off}
    result = _train(tiny.config(model=model), self._dir())
    self.assertEqual(result.evaluation["activated_share"], 1.0)

  def test_evaluation_uses_the_averaged_parameters(self):
    raw = _train(_config(eval={"use_ema": False}), self._dir())
    chex.assert_trees_all_equal(raw.state.ema, self.result.state.ema)
    losses = [run.evaluation["loss"] for run in (self.result, raw)]
    self.assertFalse(np.isclose(losses[0], losses[1], rtol=1e-2))


if __name__ == "__main__":
  absltest.main()
