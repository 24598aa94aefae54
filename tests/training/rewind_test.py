"""Runs that go back over batches whose loss is NaN or a spike."""

import contextlib
import functools
import json
import os
from unittest import mock

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import RewindConfig
from moh_jax.data.pipeline import TrainBatches
from moh_jax.inference.restore import restore
from moh_jax.runtime.steps import list_steps
from moh_jax.training import loop
from moh_jax.training.rewind import BadStepError, Watch
from tests.training import tiny

_STEPS = 8


def _config(steps=_STEPS, **rewind):
  return tiny.llm_config(
    train={"steps": steps, "rewind": RewindConfig(**{"steps": 1, **rewind})},
    optim={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
  )


@contextlib.contextmanager
def _batches(*bad: int, skip: tuple[int, int] | None = None):
  """Makes batches bad by number; `skip` jumps from one number to another."""
  read = TrainBatches.__next__

  def read_bad(self):
    if skip and self.position == skip[0]:
      self.seek(skip[1])
    number, batch = self.position, read(self)
    if number in bad:
      batch["weights"] = batch["weights"] * np.float32(np.nan)
    return batch

  with mock.patch.object(TrainBatches, "__next__", read_bad):
    yield


def _train(workdir, config=None):
  return loop.train(config or _config(), workdir, devices=jax.devices()[:1])


def _rows(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [row for row in rows if row["split"] == "train"]


class RewindTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    make_dir = functools.partial(cls.create_tempdir, cls())
    # Checkpoints are made every 2 steps, so step 5 goes back to step 4.
    cls.workdir = make_dir("rewound").full_path
    with _batches(4), cls().assertLogs(level="WARNING") as logs:
      cls.result = _train(cls.workdir)
    cls.log = "\n".join(logs.output)
    with _batches(skip=(4, 5)):
      cls.expected = _train(make_dir("skipped").full_path)

  def test_goes_on_as_if_the_batches_had_never_been(self):
    self.assertEqual(int(self.result.state.step), _STEPS)
    chex.assert_trees_all_equal(
      jax.device_get(self.result.state), jax.device_get(self.expected.state)
    )

  def test_says_so_in_the_log_and_in_metrics(self):
    self.assertRegex(
      self.log, r"loss=nan at step 5: going back to step 4.*rewind 1 of 3"
    )
    rows = [(row["step"], row["rewinds"]) for row in _rows(self.workdir)]
    expected = [(n, 0 if n < 5 else 1) for n in range(1, _STEPS + 1)]
    self.assertEqual(rows, expected)

  def test_a_resumed_run_is_the_same(self):
    workdir = self.create_tempdir().full_path
    with _batches(4):
      _train(workdir, _config(steps=6))
      resumed = _train(workdir)
    chex.assert_trees_all_equal(
      jax.device_get(resumed.state), jax.device_get(self.result.state)
    )
    self.assertEqual(_rows(workdir)[-1]["rewinds"], 1)

  def test_bad_batches_before_the_first_checkpoint_start_anew(self):
    workdir = self.create_tempdir().full_path
    with _batches(0):
      _train(workdir, _config(steps=2))
    self.assertEqual(list_steps(workdir), [2])
    self.assertEqual(_rows(workdir)[-1]["rewinds"], 1)

  def test_the_limit_ends_the_run_and_keeps_a_good_checkpoint(self):
    workdir = self.create_tempdir().full_path
    pattern = r"loss=nan at step 5; the last whole checkpoint .* is step 4$"
    with (
      _batches(4, 5),
      self.assertRaisesRegex(loop.NonFiniteLossError, pattern),
    ):
      _train(workdir, _config(limit=1))
    params = jax.tree.leaves(restore(workdir).params)
    self.assertTrue(all(np.isfinite(leaf).all() for leaf in params))


class WatchTest(parameterized.TestCase):
  @parameterized.parameters(
    (9, [2, 4, 6, 8], 4),
    (9, [2, 4, 5], 4),
    (9, [6, 8], 6),  # none is far enough back
    (9, [], -1),
  )
  def test_goes_back_far_enough_where_it_can(self, step, saved, target):
    watch = Watch(RewindConfig(steps=5))
    self.assertEqual(watch.target(step, saved), target)

  def test_a_spike_is_a_multiple_of_the_mean_before(self):
    watch = Watch(RewindConfig(steps=5, spike=2.0))
    for step in range(1, 10):
      watch.check(step, step, {"loss": 3.0 + step % 2, "grad_norm": 1.0})
    again = Watch(RewindConfig(steps=5, spike=2.0))
    again.restore(json.loads(json.dumps(watch.to_json())), 0)
    for one in (watch, again):
      one.check(10, 10, {"loss": 6.0, "grad_norm": 1.0})
      with self.assertRaisesRegex(BadStepError, "loss=9, .* at step 11"):
        one.check(11, 11, {"loss": 9.0, "grad_norm": 1.0})

  def test_without_a_factor_only_what_is_not_finite_is_bad(self):
    watch = Watch(RewindConfig())
    for loss in (1.0, 1e9):
      watch.check(1, 1, {"loss": loss, "grad_norm": 1.0})
    with self.assertRaisesRegex(BadStepError, "grad_norm=inf at step 3"):
      watch.check(3, 3, {"loss": 1.0, "grad_norm": float("inf")})
    self.assertFalse(watch.may_rewind())


if __name__ == "__main__":
  absltest.main()
