import functools
import itertools
import pathlib
import subprocess
import tempfile
from unittest import mock

from absl.testing import absltest

from moh_jax.training import timing
from moh_jax.training.timing import Timing


class InterleavedTest(absltest.TestCase):
  def _times(self, seconds, rounds, **options):
    """Times calls "a", "b", ... that last so many seconds each time."""
    now, order = [0.0], []

    def call(name, lasts):
      now[0] += next(lasts)
      order.append(name)

    calls = {
      name: functools.partial(call, name, iter(lasts))
      for name, lasts in seconds.items()
    }
    with mock.patch.object(timing.time, "perf_counter", lambda: now[0]):
      return timing.interleaved(calls, rounds, **options), "".join(order)

  def test_calls_run_in_turns_after_one_that_warms_up(self):
    ones = itertools.repeat(1.0)
    _, order = self._times({"a": ones, "b": ones}, 3)
    self.assertEqual(order, "ab" + "ababab")

  def test_median_and_spread_leave_out_the_warm_up(self):
    times, _ = self._times({"a": [9, 1, 2, 3, 4, 5]}, 5)
    self.assertEqual(times, {"a": Timing(3.0, (4.5 - 1.5) / 3.0)})

  def test_one_round_has_no_spread(self):
    times, _ = self._times({"a": [9, 2]}, 1)
    self.assertEqual(times, {"a": Timing(2.0, 0.0)})

  def test_ratios_are_between_calls_of_one_turn(self):
    # The machine is three times as slow in the second turn.
    times, _ = self._times({"a": [9, 1, 3, 1], "b": [9, 2, 6, 2]}, 3)
    self.assertEqual(times["a"].over(times["b"]), Timing(0.5, 0.0))
    self.assertGreater(times["a"].spread, 1)

  def test_short_calls_are_repeated_in_a_turn_after_one_to_warm_up(self):
    seconds = {"a": itertools.repeat(0.3), "b": itertools.repeat(2.0)}
    times, order = self._times(seconds, 2, min_seconds=1.0)
    self.assertEqual(order, "aabb" + "aaaaab" * 2)
    self.assertAlmostEqual(times["a"].median, 0.3)

  def test_an_evaluation_is_a_part_of_its_call(self):
    times, _ = self._times({"a": [9, 2, 4, 6]}, 3, evaluations={"a": 4})
    self.assertEqual(times["a"].median, 1.0)
    self.assertEqual(times["a"].turns, (0.5, 1.0, 1.5))

  def test_what_takes_no_time_is_not_repeated_forever(self):
    _, order = self._times({"a": itertools.repeat(1e-9)}, 1, min_seconds=1.0)
    self.assertLen(order, 3 + timing._MAX_REPEATS)


class MachineTest(absltest.TestCase):
  def test_names_what_a_result_depends_on(self):
    self.assertEqual(
      list(timing.machine()),
      [
        *("device", "platform", "cpu", "cores", "python", "jax"),
        *("moh_jax", "commit"),
      ],
    )

  def test_a_package_that_is_not_in_git_has_no_commit(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    file = root / "site-packages" / "moh_jax" / "training" / "timing.py"
    file.parent.mkdir(parents=True)
    commit = "-c user.name=a -c user.email=a commit -q --allow-empty -m a"
    for args in ("init -q", commit):  # a repository of somebody else
      subprocess.run(["git", "-C", root, *args.split()], check=True)
    with mock.patch.object(timing, "__file__", str(file)):
      self.assertIsNone(timing.machine()["commit"])


if __name__ == "__main__":
  absltest.main()
