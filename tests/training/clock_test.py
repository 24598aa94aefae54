"""What a run shows of itself: seconds, goodput, MFU, traces, W&B, programs."""

import json
import os
import pathlib
import types
from unittest import mock

import jax
import pytest
from absl.testing import absltest
from etils import epath

from moh_jax.runtime import compilation_cache
from moh_jax.training import clock, entrance, flops
from moh_jax.training.clock import NAME, RunClock
from tests import folders
from tests.training import tiny


class RunClockTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = epath.Path(self.create_tempdir().full_path)
    self.file = pathlib.Path(self.dir) / NAME

  def _start(self, step=0):
    """A run's clock, and the seconds that it reads."""
    now = types.SimpleNamespace(seconds=0.0)
    found = RunClock(lambda: now.seconds)
    now.seconds += 2
    found.begin(self.dir, step)
    found.at(step)
    return found, now

  def _record(self):
    return json.loads(self.file.read_text())

  def test_phases_are_exclusive_and_speed_is_that_of_training(self):
    found, now = self._start()
    with found.phase("compile"):
      now.seconds += 100
    now.seconds += 5
    with found.phase("evaluate"):
      now.seconds += 3
      with found.phase("save"):
        now.seconds += 1
    now.seconds += 1
    expected = {"restart": 2.0, "compile": 100.0, "step": 6.0}
    expected |= {"wait_for_data": 0.0, "evaluate": 3.0, "save": 1.0}
    self.assertEqual(found.seconds(), expected)
    self.assertAlmostEqual(found.metrics()["goodput"], 6 / 112)
    self.assertEqual(found.seconds_per_step(2), 3.5)
    now.seconds += 9
    self.assertEqual(found.seconds_per_step(5), 3.0)

  def test_starts_add_up_but_not_what_comes_after_a_checkpoint(self):
    for runs, step in ((1, 0), (2, 4), (3, 8)):
      found, now = self._start(step)
      now.seconds += 6
      (self.dir / "checkpoints" / str(step + 4)).mkdir(parents=True)
      found.save(step + 4)
      now.seconds += 50
      found.save(step + 6)  # killed before this checkpoint was whole
      stored = self._record()["at"][str(step + 4)]
      self.assertEqual(stored["runs"], runs)
      self.assertEqual(stored["seconds"]["step"], 6.0 * runs)
    self.assertEqual(self._record()["restarts"], 2)
    self.assertEqual(self._record()["goodput"], 68 / 74)
    found, _ = self._start(0)  # a new run in the old folder
    found.save(0)
    self.assertEqual(self._record()["runs"], 1)

  def test_damaged_file_begins_anew(self):
    for content in ("{", "[]", '{"runs": "x", "seconds": {}}', '{"runs": 1}'):
      self.file.write_text(content)
      with self.assertLogs("moh_jax", "WARNING"):
        found, _ = self._start(4)
      self.assertEqual(found.seconds()["step"], 0.0)

  def test_a_pipe_is_refused_and_not_waited_for(self):
    os.mkfifo(self.dir / "goodput.json")
    with self.assertRaisesRegex(ValueError, "goodput.json: is "):
      self._start()

  def test_percentiles_are_of_the_steps_since_the_last_row(self):
    found, now = self._start()
    for seconds in (1, 1, 1, 5):
      now.seconds += seconds
      found.step_done()
    metrics = found.metrics()
    self.assertEqual(metrics["step_seconds_p50"], 1.0)
    self.assertGreater(metrics["step_seconds_p99"], 4.0)
    self.assertNotIn("step_seconds_p50", found.metrics())
    now.seconds += 90  # a step that the run goes back over
    found.step_done()
    found.at(2)
    now.seconds += 3
    found.step_done()
    self.assertEqual(found.metrics()["step_seconds_p99"], 3.0)


class RunTest(folders.FolderTest):
  @pytest.mark.integration
  def test_run_writes_times_goodput_mfu_and_a_trace(self):
    config = tiny.llm_config(
      log={"every": 2, "profile": "2:4"}, train={"compilation_cache": "/kept"}
    )
    with (
      mock.patch.object(flops, "published_peak", return_value=1e12),
      mock.patch.object(compilation_cache, "keep_in") as keep_in,
    ):
      tiny.train(config, self.root)
    keep_in.assert_called_once_with("/kept")
    lines = (self.root / "metrics.jsonl").read_text().splitlines()
    rows = [r for r in map(json.loads, lines) if r["split"] == "train"]
    self.assertLen(rows, 2)
    for row in rows:
      self.assertLessEqual(row["step_seconds_p50"], row["step_seconds_p99"])
      self.assertBetween(row["goodput"], 0, 1)
      self.assertBetween(row["mfu"], 0, row["mfu_every_head"])
      self.assertLess(row["mfu"], row["mfu_every_head"])
    record = json.loads((self.root / "goodput.json").read_text())
    self.assertEqual(record["restarts"], 0)
    self.assertIn("4", record["at"])
    for phase in ("restart", "compile", "step", "save", "evaluate"):
      self.assertGreater(record["seconds"][phase], 0, phase)
    (trace,) = (self.root / "profile").rglob("*.xplane.pb")
    self.assertIn(b"step_num", trace.read_bytes())

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

  def test_missing_wandb_is_refused_before_the_run(self):
    with mock.patch.object(
      entrance.importlib.util, "find_spec", return_value=None
    ):
      with self.assertRaisesRegex(ValueError, "log.wandb='p' needs .* wandb"):
        tiny.train(tiny.llm_config(log={"wandb": "p"}), "/nonexistent/run")
