"""A run that is stopped or killed continues exactly where it was saved."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from unittest import mock

import chex
import jax
from absl.testing import absltest, parameterized

from moh_jax.runtime import steps
from moh_jax.training import feed
from moh_jax.training.train import Result, train
from tests.training import tiny

_STEPS = 6

_FAMILIES = {
  "vit": functools.partial(tiny.config, model=tiny.ALIKE["vit"]),
  "dit": functools.partial(tiny.dit_config, model=tiny.ALIKE["dit"]),
  "llm": tiny.llm_config,
}
_OPTIM = {
  "vit": {"ema_decay": 0.9, "accumulation": 2},
  "dit": {},  # as it is: averaged
  "llm": {"accumulation": 2},  # and averaged
}


def _config(family):
  return _FAMILIES[family](
    train={"steps": _STEPS},
    checkpoint={"every": _STEPS // 2},
    optim=_OPTIM[family],
  )


def _train(workdir: str, family: str) -> Result:
  return train(_config(family), workdir, devices=jax.devices()[:1])


class ResumeTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.whole = {
      family: _train(os.path.join(cls.root, family), family)
      for family in _FAMILIES
    }

  # Stopping is the same for every family, so the quickest is enough; the test
  # after this one continues a run of each.
  def test_run_stopped_by_sigterm_resumes_bit_identically(self):
    family = "llm"
    workdir = self.create_tempdir().full_path
    take = feed.Feed.__next__

    def stop_at_four(batches):
      if batches.position == 3:
        os.kill(os.getpid(), signal.SIGTERM)
      return take(batches)

    with mock.patch.object(feed.Feed, "__next__", stop_at_four):
      stopped = _train(workdir, family)
    self.assertFalse(stopped.finished)
    self.assertEqual(steps.find_step(workdir, None), 4)

    resumed = _train(workdir, family)
    self.assertTrue(resumed.finished)
    whole = self.whole[family]
    chex.assert_trees_all_equal(resumed.state, whole.state)
    self.assertEqual(resumed.evaluation, whole.evaluation)

  @parameterized.parameters(*_FAMILIES)
  def test_run_killed_by_sigkill_resumes_bit_identically(self, family):
    workdir = self.create_tempdir().full_path
    script = textwrap.dedent(f"""
      import os, pathlib, signal, time
      import jax
      from moh_jax.training import feed
      from tests.training import resume_test

      take = feed.Feed.__next__

      def die_at_five(batches):
        if batches.position == 4:  # step 3 is being saved in the background
          saved = pathlib.Path({workdir!r}) / "checkpoints" / "3"
          while not saved.exists():
            time.sleep(0.05)
          os.kill(os.getpid(), signal.SIGKILL)
        return take(batches)

      feed.Feed.__next__ = die_at_five
      resume_test._train({workdir!r}, {family!r})
    """)
    done = subprocess.run([sys.executable, "-c", script], check=False)
    self.assertEqual(done.returncode, -signal.SIGKILL)
    self.assertEqual(steps.find_step(workdir, None), 3)

    resumed = _train(workdir, family)
    chex.assert_trees_all_equal(resumed.state, self.whole[family].state)

  def test_finished_run_started_again_only_evaluates(self):
    with mock.patch.object(feed.Feed, "__next__", side_effect=AssertionError):
      again = _train(os.path.join(self.root, "llm"), "llm")
    self.assertEqual(again.evaluation, self.whole["llm"].evaluation)
    self.assertEqual(int(again.state.step), _STEPS)

  def test_run_is_made_longer_from_a_checkpoint_before_its_fall(self):
    """In a copy without the later steps, as docs/resume.md says."""

    def run(workdir, steps):
      optim = {"schedule": "wsd", "warmup_steps": 1, "decay_steps": 2}
      config = tiny.llm_config(train={"steps": steps}, optim=optim)
      return train(config, workdir, devices=jax.devices()[:1])

    copied, other = (self.create_tempdir().full_path for _ in range(2))
    run(copied, 4)
    shutil.rmtree(os.path.join(copied, "checkpoints", "4"))
    longer, whole = run(copied, 6), run(other, 6)
    # The program of another schedule rounds the learning rate otherwise.
    chex.assert_trees_all_close(longer.state, whole.state, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
