"""Runs that go back over batches whose loss is NaN or a spike."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
from unittest import mock

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import RewindConfig
from moh_jax.data.pipeline import TrainBatches
from moh_jax.inference.restore import restore
from moh_jax.runtime import signals
from moh_jax.runtime.steps import find_damage, list_steps
from moh_jax.training import language_modeling
from moh_jax.training.saving import BadStepError, NonFiniteLossError, Watch
from moh_jax.training.train import train
from tests.training import tiny

_STEPS = 8


def _config(steps=_STEPS, keep_last=2, back=1, **rewind):
  return tiny.llm_config(
    train={"steps": steps, "rewind": RewindConfig(steps=back, **rewind)},
    checkpoint={"every": 2, "keep_last": keep_last},
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


@contextlib.contextmanager
def _before_rewinds(do):
  """Does something when a run asks whether it may go back."""
  may_rewind = Watch.may_rewind

  def asked(self):
    do()
    return may_rewind(self)

  with mock.patch.object(Watch, "may_rewind", asked):
    yield


def _damage(workdir, step):
  file = pathlib.Path(workdir, f"checkpoints/{step}/data/metadata")
  file.write_bytes(file.read_bytes().replace(b"position", b"positioN", 1))


def _train(workdir, config=None):
  return train(config or _config(), workdir, devices=jax.devices()[:1])


def _rows(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [row for row in rows if row["split"] == "train"]


class RewindTest(parameterized.TestCase):
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

  @parameterized.parameters((1, 4), (3, 2))
  def test_goes_past_a_damaged_step_which_is_set_aside(self, back, target):
    """The step that is damaged is the one to go back to, or the oldest."""
    workdir = self.create_tempdir().full_path
    damaged = target + 2
    with (
      _batches(6),
      _before_rewinds(lambda: _damage(workdir, damaged)),
      self.assertLogs("moh_jax", "WARNING") as logs,
    ):
      result = _train(workdir, _config(keep_last=3, back=back))
    self.assertIn(f"going back to step {target}, ", "\n".join(logs.output))
    self.assertEqual(int(result.state.step), _STEPS)
    aside = os.listdir(os.path.join(workdir, "checkpoints", "damaged"))
    self.assertCountEqual(aside, [f"{s}.1" for s in range(target + 2, 7, 2)])
    for step in list_steps(workdir):
      self.assertEqual(find_damage(workdir, step), {})

  def test_the_limit_names_no_damaged_step_as_whole(self):
    workdir = self.create_tempdir().full_path
    pattern = r"loss=nan at step 5; the last whole checkpoint .* is step 2$"
    with (
      _batches(4),
      _before_rewinds(lambda: _damage(workdir, 4)),
      self.assertRaisesRegex(NonFiniteLossError, pattern),
    ):
      _train(workdir, _config(back=0))

  def test_pictures_are_those_of_the_steps_that_count(self):
    """Also of a run that is stopped before it shows a step again."""
    make, check = language_modeling.make_task, Watch.check

    def with_preview(config, decode=None):
      return dataclasses.replace(
        make(config, decode),
        preview=lambda params, _: np.asarray(params["head"]["kernel"]).view(
          np.uint8
        )[..., None],
        preview_every=6,
      )

    def run(stop_at=0):
      seen = []

      def check_and_stop(self, step, position, values):
        seen.append(step)
        if seen.count(6) == stop_at and step == 6:
          os.kill(os.getpid(), signal.SIGTERM)
        return check(self, step, position, values)

      with _batches(6), mock.patch.object(Watch, "check", check_and_stop):
        return _train(workdir, _config(back=3))

    workdir = self.create_tempdir().full_path
    file = pathlib.Path(workdir, "samples", "00000006.png")
    other = file.with_name("00000007.png")  # not of the run
    other.parent.mkdir()
    other.touch()
    with mock.patch.object(language_modeling, "make_task", with_preview):
      self.assertFalse(run(stop_at=2).finished)
      run()
      resumed = file.read_bytes()
      self.assertTrue(other.exists())
      workdir = self.create_tempdir().full_path
      file = pathlib.Path(workdir, "samples", "00000006.png")
      run()
    self.assertEqual(resumed, file.read_bytes())

  @parameterized.parameters("check", "may_rewind")
  def test_sigterm_in_the_step_that_rewinds_saves_and_stops(self, when):
    workdir = self.create_tempdir().full_path
    check, stops = Watch.check, []

    def stop():
      if not stops:
        stops.append(os.kill(os.getpid(), signal.SIGTERM))

    def check_and_stop(self, step, position, values):
      if when == "check" and step == 5:
        stop()
      return check(self, step, position, values)

    with (
      _batches(4),
      signals.handled(),  # as a command has them
      mock.patch.object(Watch, "check", check_and_stop),
      _before_rewinds(stop),
    ):
      stopped = _train(workdir)
    self.assertFalse(stopped.finished)
    self.assertEqual(int(stopped.state.step), 5)
    with _batches(4):
      resumed = _train(workdir)
    chex.assert_trees_all_equal(
      jax.device_get(resumed.state), jax.device_get(self.result.state)
    )

  def test_the_limit_ends_the_run_and_keeps_a_good_checkpoint(self):
    workdir = self.create_tempdir().full_path
    pattern = r"loss=nan at step 5; the last whole checkpoint .* is step 4$"
    with (
      _batches(4, 5),
      self.assertRaisesRegex(NonFiniteLossError, pattern),
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
    again.restore(json.loads(json.dumps(watch.to_json())))
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
