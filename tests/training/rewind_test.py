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
import pytest
from absl.testing import parameterized
from PIL import Image

from moh_jax.config import RewindConfig
from moh_jax.data.pipeline import TrainBatches
from moh_jax.inference.restore import restore
from moh_jax.runtime import signals
from moh_jax.runtime.steps import find_damage, list_steps
from moh_jax.training import language_modeling
from moh_jax.training.saving import BadStepError, NonFiniteLossError, Watch
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


def _damage(workdir, step):
  file = pathlib.Path(workdir, f"checkpoints/{step}/data/metadata")
  file.write_bytes(file.read_bytes().replace(b"position", b"positioN", 1))


class RewindTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    make_dir = functools.partial(cls.create_tempdir, cls())
    # Checkpoints are made every 2 steps, so step 5 goes back to step 4.
    cls.workdir = make_dir("rewound").full_path
    with _batches(4), cls().assertLogs(level="WARNING") as logs:
      cls.result = tiny.train(_config(), cls.workdir)
    cls.log = "\n".join(logs.output)
    with _batches(skip=(4, 5)):
      cls.expected = tiny.train(_config(), make_dir("skipped").full_path)

  def _dir(self):
    return self.create_tempdir().full_path

  @pytest.mark.integration
  def test_goes_on_as_if_the_batches_had_never_been_and_says_so(self):
    self.assertEqual(int(self.result.state.step), _STEPS)
    chex.assert_trees_all_equal(
      *jax.device_get((self.result.state, self.expected.state))
    )
    self.assertRegex(
      self.log, r"loss=nan at step 5: going back to step 4.*rewind 1 of 3"
    )
    rows = tiny.rows(self.workdir, "train")
    self.assertEqual(
      [(row["step"], row["rewinds"]) for row in rows],
      [(n, 0 if n < 5 else 1) for n in range(1, _STEPS + 1)],
    )

  @pytest.mark.integration
  def test_bad_batches_before_the_first_checkpoint_start_anew(self):
    workdir = self._dir()
    with _batches(0):
      tiny.train(_config(steps=2), workdir)
    self.assertEqual(list_steps(workdir), [2])
    self.assertEqual(tiny.rows(workdir, "train")[-1]["rewinds"], 1)

  @pytest.mark.integration
  def test_goes_past_a_damaged_step_which_is_set_aside(self):
    """The step that is damaged is the one to go back to."""
    workdir = self._dir()
    with (
      _batches(6),
      tiny.before(Watch, "may_rewind", lambda _: _damage(workdir, 4)),
      self.assertLogs("moh_jax", "WARNING") as logs,
    ):
      result = tiny.train(_config(keep_last=3, back=3), workdir)
    self.assertIn("going back to step 2, ", "\n".join(logs.output))
    self.assertEqual(int(result.state.step), _STEPS)
    aside = os.listdir(os.path.join(workdir, "checkpoints", "damaged"))
    self.assertCountEqual(aside, ["4.1", "6.1"])
    for step in list_steps(workdir):
      self.assertEqual(find_damage(workdir, step), {})

  def _stopping_at(self, step, times):
    """Patch: SIGTERM when the metrics of a step are read so many times."""
    seen = []

    def stop(watch, number, *_):
      del watch
      seen.append(number)
      if number == step and seen.count(step) == times:
        os.kill(os.getpid(), signal.SIGTERM)

    return tiny.before(Watch, "check", stop)

  @pytest.mark.integration
  def test_pictures_are_those_of_the_steps_that_count(self):
    """Also of a run that is stopped before it shows a step again."""
    make = language_modeling.make_task

    def picture(params, mesh=None):
      del mesh
      return np.asarray(params["head"]["kernel"]).view(np.uint8)[..., None]

    def with_preview(config, decode=None):
      task = make(config, decode)
      return dataclasses.replace(task, preview=picture, preview_every=6)

    workdir = self._dir()
    file = pathlib.Path(workdir, "samples", "00000006.png")
    other = file.with_name("00000007.png")  # not of the run
    other.parent.mkdir()
    other.touch()
    with (
      _batches(6),
      self._stopping_at(6, 2),
      mock.patch.object(language_modeling, "make_task", with_preview),
    ):
      stopped = tiny.train(_config(back=3), workdir)
      self.assertFalse(stopped.finished)
      self.assertFalse(file.exists())
      tiny.train(_config(back=3), workdir)
    self.assertTrue(other.exists())
    with Image.open(file) as shown:
      expected = picture(stopped.state.ema)[..., 0]
      np.testing.assert_array_equal(np.asarray(shown), expected)

  @pytest.mark.integration
  def test_sigterm_in_the_step_that_rewinds_saves_and_stops(self):
    workdir = self._dir()
    with (
      _batches(4),
      signals.handled(),  # as a command has them
      self._stopping_at(5, 1),
    ):
      stopped = tiny.train(_config(), workdir)
    self.assertFalse(stopped.finished)
    self.assertEqual(int(stopped.state.step), 5)
    with _batches(4):
      resumed = tiny.train(_config(), workdir)
    chex.assert_trees_all_equal(
      *jax.device_get((resumed.state, self.result.state))
    )
    self.assertEqual(tiny.rows(workdir, "train")[-1]["rewinds"], 1)

  @pytest.mark.integration
  def test_the_limit_ends_the_run_and_names_a_whole_checkpoint(self):
    workdir, asked = self._dir(), []

    def damage(_):
      asked.append(_damage(workdir, 4) if asked else None)

    pattern = r"loss=nan at step 5; the last whole checkpoint .* is step 2$"
    with (
      _batches(4, 5),
      tiny.before(Watch, "may_rewind", damage),
      self.assertRaisesRegex(NonFiniteLossError, pattern),
    ):
      tiny.train(_config(limit=1), workdir)
    params = jax.tree.leaves(restore(workdir, step=2).params)
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
