"""Calls timed in turns."""

import functools
import itertools
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import LoraConfig
from moh_jax.training import bench
from tests.training import tiny


class TurnsTest(parameterized.TestCase):
  """Programs "a", "b", ... that last so many seconds each time."""

  def _timed(self, seconds, rounds, **options):
    """What is measured, and the calls in order."""
    now, order = [0.0], []

    def call(name, lasts):
      now[0] += next(lasts)
      order.append(name)

    calls = {
      name: functools.partial(call, name, iter(lasts))
      for name, lasts in seconds.items()
    }
    with mock.patch.object(bench.time, "perf_counter", lambda: now[0]):
      times = bench.interleaved(calls, rounds, **options)
    return times, "".join(order)

  def test_median_and_ratios_are_those_of_turns_after_one_to_warm_up(self):
    times, _ = self._timed({"a": [9, 2]}, 1)
    self.assertEqual(times, {"a": bench.Timing(2.0, 0.0)})
    times, _ = self._timed({"a": [9, 2, 4, 6]}, 3)
    self.assertEqual(times, {"a": bench.Timing(4.0, 1.0)})
    # The machine is three times as slow in the second turn.
    seconds = {"a": [9, 1, 3, 1], "b": [9, 2, 6, 2]}
    times, order = self._timed(seconds, 3)
    self.assertEqual(order, "ab" + "ababab")
    self.assertEqual(times["a"].over(times["b"]), bench.Timing(0.5, 0.0))
    self.assertGreater(times["a"].spread, 1)

  def test_short_calls_are_repeated_in_a_turn_after_one_to_warm_up(self):
    a, b = itertools.repeat(0.3), itertools.repeat(2.0)
    time = functools.partial(self._timed, min_seconds=1.0)
    times, order = time({"a": a, "b": b}, 2)
    self.assertEqual(order, "aabb" + "aaaaab" * 2)
    self.assertAlmostEqual(times["a"].median, 0.3)
    _, order = time({"a": itertools.repeat(1e-9)}, 1)
    self.assertLess(len(order), 2000)


class StepTest(absltest.TestCase):
  @pytest.mark.integration
  def test_adapters_and_latents_are_timed_without_their_files(self):
    lora = {"lora": LoraConfig(rank=2, base_dtype="int8")}
    latents = {"diffusion": {"space": "latent"}, "sample": {"every": 1}}
    latents["mesh"] = {"data": -1}
    latents["data"] = {"source": "fake", "fake_examples": 16}
    runs = {
      "adapters": tiny.llm_config(tune=lora, mesh={"data": -1}),
      "latents": tiny.dit_config(**latents),
    }
    times = bench.step_seconds(runs, 1)
    self.assertGreater(min(time.median for time in times.values()), 0)
