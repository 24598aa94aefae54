"""The training run: reproducibility, errors before work, NaN, records."""

import dataclasses
import json
import os

import chex
import jax
import numpy as np
from absl.testing import absltest

from moh_jax.config import Config
from moh_jax.training import checkpoint, loop
from tests.training import tiny


def _train(config: Config, workdir: str) -> loop.Result:
  return loop.train(config, workdir, devices=jax.devices()[:1])


class LoopTest(absltest.TestCase):
  def _dir(self) -> str:
    return self.create_tempdir().full_path

  def test_same_seed_gives_the_same_run_and_another_differs(self):
    runs = [
      _train(tiny.config(train={"seed": seed}), self._dir()).state.params
      for seed in (0, 0, 1)
    ]
    chex.assert_trees_all_equal(runs[0], runs[1])
    kernels = [run["head"]["kernel"] for run in (runs[0], runs[2])]
    self.assertGreater(float(abs(kernels[0] - kernels[1]).max()), 1e-3)

  def test_writes_a_row_per_step_and_split(self):
    workdir = self._dir()
    _train(tiny.config(eval={"every": 2}), workdir)
    with open(os.path.join(workdir, "metrics.jsonl")) as stream:
      rows = [json.loads(line) for line in stream]
    steps = [(row["step"], row["split"]) for row in rows]
    self.assertCountEqual(
      steps, [(s, "train") for s in (1, 2, 3, 4)] + [(2, "val"), (4, "val")]
    )
    self.assertLess(
      {"loss", "balance_loss", "activated_share", "lr"}, set(rows[0])
    )

  def test_keeps_last_and_every(self):
    workdir = self._dir()
    saves = {"every": 1, "keep_last": 1, "keep_every": 2}
    _train(tiny.config(train={"steps": 5}, checkpoint=saves), workdir)
    folders = os.listdir(os.path.join(workdir, "checkpoints"))
    self.assertCountEqual(folders, ["2", "4", "5"])

  def test_nonfinite_loss_names_step_and_last_checkpoint(self):
    config = tiny.config(
      optim={"lr": 1e38, "warmup_steps": 0}, checkpoint={"every": 1}
    )
    workdir = self._dir()
    pattern = r"=(nan|inf) at step 2; the last good checkpoint is step 1"
    with self.assertRaisesRegex(loop.NonFiniteLossError, pattern):
      _train(config, workdir)
    self.assertEqual(checkpoint.find_step(workdir, None), 1)

  def test_other_models_checkpoint_is_refused_by_field(self):
    workdir = self._dir()
    _train(tiny.config(train={"steps": 2}), workdir)
    other = tiny.config(model={"top_k": (0, 2)})
    with self.assertRaisesRegex(ValueError, r"model\.top_k: \(0, 2\) here"):
      _train(other, workdir)

  def test_other_seed_or_batch_cannot_continue_a_run(self):
    workdir = self._dir()
    _train(tiny.config(train={"steps": 2}), workdir)
    other = tiny.config(train={"seed": 1}, data={"batch_size": 32})
    pattern = r"train\.seed: 1 here, 0 there; data\.batch_size: 32 here"
    with self.assertRaisesRegex(ValueError, pattern):
      _train(other, workdir)

  def test_run_beyond_its_steps_is_refused(self):
    workdir = self._dir()
    _train(tiny.config(train={"steps": 3}), workdir)
    with self.assertRaisesRegex(ValueError, "step 3, beyond train.steps=2"):
      _train(tiny.config(train={"steps": 2}), workdir)

  def test_runtime_fields_may_change_in_a_continued_run(self):
    workdir = self._dir()
    _train(tiny.config(train={"steps": 2}), workdir)
    longer = tiny.config(train={"steps": 3}, model={"remat": "full"})
    self.assertEqual(int(_train(longer, workdir).state.step), 3)

  def test_batch_must_divide_over_mesh_and_microbatches(self):
    config = tiny.config(mesh={"data": 8}, optim={"accumulation": 4})
    with self.assertRaisesRegex(ValueError, "data.batch_size=16 .* 32"):
      loop.train(config, self._dir())

  def test_mesh_must_fit_the_devices(self):
    config = tiny.config(mesh={"data": 3})
    with self.assertRaisesRegex(ValueError, "needs 3 devices, there are 8"):
      loop.train(config, self._dir())

  def test_unwritable_workdir_is_named(self):
    file = self.create_tempfile().full_path
    with self.assertRaisesRegex(OSError, f"workdir {file}/run cannot"):
      _train(tiny.config(), f"{file}/run")

  def test_classes_must_be_the_datas(self):
    config = tiny.config(model={"num_classes": 7})
    with self.assertRaisesRegex(ValueError, "model.num_classes=7 .* 10"):
      _train(config, self._dir())

  def test_router_off_trains_the_baseline(self):
    model = {"router": "none", "shared_heads": (2, 4), "top_k": (0, 0)}
    result = _train(tiny.config(model=model), self._dir())
    self.assertEqual(result.evaluation["activated_share"], 1.0)

  def test_evaluation_uses_the_averaged_parameters(self):
    decay = tiny.config(optim={"ema_decay": 0.999, "lr": 0.1})
    raw = dataclasses.replace(
      decay, eval=dataclasses.replace(decay.eval, use_ema=False)
    )
    losses = [_train(c, self._dir()).evaluation["loss"] for c in (decay, raw)]
    self.assertFalse(np.isclose(losses[0], losses[1], rtol=1e-2))


if __name__ == "__main__":
  absltest.main()
