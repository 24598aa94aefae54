"""Seconds of a run by phase, over several starts."""

import json
import pathlib

from absl.testing import absltest
from etils import epath

from moh_jax.training.clock import NAME, PHASES, RunClock


class _Time:
  """A clock that is set by hand."""

  def __init__(self):
    self.seconds = 0.0

  def __call__(self):
    return self.seconds


class RunClockTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = epath.Path(self.create_tempdir().full_path)
    self.file = pathlib.Path(self.dir) / NAME

  def _start(self, step=0, restart=2.0):
    time = _Time()
    clock = RunClock(time)
    time.seconds += restart
    clock.begin(self.dir, step)
    clock.at(step)
    return clock, time

  def test_phases_are_exclusive(self):
    clock, time = self._start()
    time.seconds += 5
    with clock.phase("evaluate"):
      time.seconds += 3
      with clock.phase("save"):
        time.seconds += 1
    time.seconds += 1
    expected = dict.fromkeys(PHASES, 0.0)
    expected |= {"restart": 2.0, "step": 6.0, "evaluate": 3.0, "save": 1.0}
    self.assertEqual(clock.seconds(), expected)
    self.assertAlmostEqual(clock.metrics()["goodput"], 6 / 12)

  def test_starts_add_up(self):
    for runs, step in ((1, 0), (2, 4), (3, 8)):
      clock, time = self._start(step)
      time.seconds += 6
      clock.save(step + 4)
      record = json.loads(self.file.read_text())
      self.assertEqual((record["runs"], record["restarts"]), (runs, runs - 1))
      self.assertEqual(record["seconds"]["step"], 6.0 * runs)
      self.assertEqual(record["goodput"], 0.75)
    clock, _ = self._start(0)  # a new run in the old folder
    clock.save(0)
    self.assertEqual(json.loads(self.file.read_text())["runs"], 1)

  def test_what_a_killed_run_did_after_its_checkpoint_is_not_counted(self):
    (self.dir / "checkpoints" / "4").mkdir(parents=True)
    clock, time = self._start()
    for step in (4, 6):  # killed before the checkpoint of step 6 was whole
      time.seconds += 5
      clock.save(step)
    again, _ = self._start(4)
    self.assertEqual(again.seconds()["step"], 5.0)
    again.save(6)
    self.assertEqual(json.loads(self.file.read_text())["seconds"]["step"], 5.0)

  def test_damaged_file_begins_anew(self):
    for content in ("{", "[]", '{"runs": "x", "seconds": {}}', '{"runs": 1}'):
      self.file.write_text(content)
      with self.assertLogs("moh_jax", "WARNING"):
        clock, _ = self._start(4)
      self.assertEqual(clock.seconds()["step"], 0.0)

  def test_speed_leaves_evaluations_and_the_compiler_out(self):
    clock, time = self._start(10)
    with clock.phase("compile"):
      time.seconds += 100
    time.seconds += 4
    with clock.phase("evaluate"):
      time.seconds += 50
    self.assertEqual(clock.seconds_per_step(12), 2.0)
    time.seconds += 9
    self.assertEqual(clock.seconds_per_step(15), 3.0)

  def test_percentiles_are_of_the_steps_since_the_last_row(self):
    clock, time = self._start()
    for seconds in (1, 1, 1, 5):
      time.seconds += seconds
      clock.step_done()
    found = clock.metrics()
    self.assertEqual(found["step_seconds_p50"], 1.0)
    self.assertGreater(found["step_seconds_p99"], 4.0)
    time.seconds += 7
    clock.step_done()
    self.assertEqual(clock.metrics()["step_seconds_p50"], 7.0)
    self.assertNotIn("step_seconds_p50", clock.metrics())
    time.seconds += 90  # a step that the run goes back over
    clock.step_done()
    clock.at(2)
    time.seconds += 3
    clock.step_done()
    self.assertEqual(clock.metrics()["step_seconds_p99"], 3.0)


if __name__ == "__main__":
  absltest.main()
