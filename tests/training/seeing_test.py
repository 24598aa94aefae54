"""What a run shows of itself: traces, times, goodput, W&B, kept programs."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import LogConfig
from moh_jax.runtime import steps
from moh_jax.training import clock, entrance, flops
from moh_jax.training.train import train
from tests.training import tiny

_RUN = """
import sys, jax
from moh_jax.training.train import train
from tests.training import tiny
config = tiny.llm_config(train={"compilation_cache": sys.argv[2]})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
train(config, sys.argv[1], devices=jax.devices()[:1])
"""


class SeeingTest(parameterized.TestCase):
  def _rows(self, workdir, split):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["split"] == split]

  def test_run_writes_times_goodput_mfu_and_a_trace(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    log = {"every": 2, "tensorboard": False, "progress": False}
    config = tiny.llm_config(log={**log, "profile": "2:4"})
    with mock.patch.object(flops, "published_peak", return_value=1e12):
      train(
        config,
        str(workdir),
        devices=jax.devices()[:1],
        at_peak=flops.at_peak,
      )
    for row in self._rows(workdir, "train"):
      self.assertLessEqual(row["step_seconds_p50"], row["step_seconds_p99"])
      self.assertBetween(row["goodput"], 0, 1)
      self.assertBetween(row["mfu"], 0, row["mfu_every_head"])
      self.assertLess(row["mfu"], row["mfu_every_head"])
    record = json.loads((workdir / "goodput.json").read_text())
    self.assertEqual(record["restarts"], 0)
    for phase in ("restart", "compile", "step", "save", "evaluate"):
      self.assertGreater(record["seconds"][phase], 0, phase)
    traces = list((workdir / "profile").rglob("*.xplane.pb"))
    self.assertLen(traces, 1)
    content = traces[0].read_bytes()
    self.assertIn(b"step_num", content)

  def test_a_trace_ends_where_the_run_goes_back(self):
    with (
      mock.patch.object(jax.profiler, "start_trace") as start,
      mock.patch.object(jax.profiler, "stop_trace") as stop,
    ):
      profiler = clock.Profiler((4, 7), pathlib.Path("run"))
      for step in (3, 4, 5, 2):
        with profiler.step(step, None):
          pass
    self.assertEqual((start.call_count, stop.call_count), (1, 1))

  def test_seconds_are_known_at_checkpoints_that_take_long(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    write = steps.write_manifest

    def slow(folder):
      time.sleep(1)
      write(folder)

    with mock.patch.object(steps, "write_manifest", slow):
      train(tiny.llm_config(), str(workdir), devices=jax.devices()[:1])
    record = json.loads((workdir / "goodput.json").read_text())
    self.assertEqual(list(record["at"]), ["2", "4"])

  @parameterized.parameters("5", "5:5", "7:5", "0:3", "a:b", "-1:3", "1:2:3")
  def test_wrong_profiles_are_refused(self, text):
    with self.assertRaisesRegex(ValueError, "log.profile=.* must be '' or"):
      LogConfig(profile=text)

  @pytest.mark.slow
  def test_kept_programs_are_used_again(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    kept = root / "xla"
    environment = {**os.environ, "JAX_LOG_COMPILES": "0"}
    for name in ("a", "b"):
      before = (
        {file.name for file in kept.glob("*-cache")} if kept.exists() else set()
      )
      subprocess.run(
        [sys.executable, "-c", _RUN, str(root / name), str(kept)],
        check=True,
        env=environment,
      )
    after = {file.name for file in kept.glob("*-cache")}
    self.assertTrue(any("jit_step" in name for name in after))
    self.assertEqual(before, after)

  def test_missing_wandb_is_refused_before_the_run(self):
    with mock.patch.object(
      entrance.importlib.util, "find_spec", return_value=None
    ):
      with self.assertRaisesRegex(ValueError, "log.wandb='p' needs .* wandb"):
        train(tiny.llm_config(log={"wandb": "p"}), "/nonexistent/run")

  def test_wandb_gets_the_metrics_offline(self):
    if importlib.util.find_spec("wandb") is None:
      self.skipTest("wandb is not installed")
    workdir = pathlib.Path(self.create_tempdir().full_path)
    log = {
      "tensorboard": False,
      "progress": False,
      "wandb": "moh",
      "heads": 1,
    }
    config = tiny.llm_config(log=log)
    with mock.patch.dict(
      os.environ, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    ):
      train(config, str(workdir), devices=jax.devices()[:1])
    (stored,) = (workdir / "wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    self.assertIn(b"train/loss", content)
    self.assertIn(b"val/", content)


if __name__ == "__main__":
  absltest.main()
