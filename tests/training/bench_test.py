"""Rows of timed programs, their table, programs, exactness, and turns."""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized

from moh_jax.training import bench
from tests.ops.devices import traced_for

_ROW = bench.Row(
  device="cpu",
  op="attention",
  mode="forward",
  length=256,
  share=0.625,
  implementation="packed",
  ms=1.23456,
  spread=0.054,
  ratio_to_mha=0.6789,
  ratio_spread=0.04,
  form="packed",
  computed_share=0.625,
  units_per_second=1e5,
  peak_bytes=12_340_000,
  compile_seconds=1.26,
  max_error=1.5e-7,
)


class TableTest(parameterized.TestCase):
  def test_rows_of_other_versions_have_no_empty_column(self):
    stored = dataclasses.asdict(_ROW) | {"removed": 1}
    rows = bench.read_rows({"rows": [stored]})
    self.assertEqual(rows, [_ROW])
    (cells,), header = bench.table_cells(rows)
    told = "forward 256 62.5% packed packed 62.5% 1.235 5% 0.68 ± 0.01 12.3 1.3"
    self.assertEqual(" ".join(map(str, cells)), f"{told} 1.5e-07")
    self.assertLen(header, len(cells))
    row = bench.Row("cpu", "model", "forward", None, 0.625, "packed")
    timed = dataclasses.replace(row, units_per_second=1e5, ratio_to_mha=0.7)
    cells, header = bench.table_cells([timed, row])
    self.assertEqual(header[3:], ["to MHA", "units/s"])
    last = [cell[3:] for cell in cells]
    self.assertEqual(last, [("0.70", "100,000.00"), ("", "")])
    # A ratio has the decimals that its spread allows.
    for spread, expected in ((0.002, "0.6789 ± 0.0007"), (0.6, "0.7 ± 0.2")):
      row = dataclasses.replace(_ROW, ratio_spread=spread)
      self.assertEqual(row.to_mha, expected)


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(
    ("cpu", True, 1), ("gpu", True, 16), ("gpu", False, 1)
  )
  def test_accelerators_evaluate_short_functions_several_times_a_call(
    self, platform, asked, loops
  ):
    x, seen = jnp.ones((256, 256)), []

    def function(x, _):
      jax.debug.callback(lambda: seen.append(0))
      return {"y": x + 1, "z": ()}

    with traced_for(platform), mock.patch.object(bench, "_SHORT", 9.0):
      program = bench.compile_program(function, x, None, loops=asked)
    self.assertEqual(program.loops, loops)
    self.assertEqual(program.bytes, 2 * 4 * 256 * 256)
    jax.effects_barrier()
    seen.clear()
    chex.assert_trees_all_equal(program.run()["y"], x + 1)
    jax.effects_barrier()
    self.assertLen(seen, loops)

  def test_accelerators_round_no_float32(self):
    for platform, dtype, precision in (
      *(("cpu", "float32", None), ("gpu", "float32", "highest")),
      ("tpu", "bfloat16", None),
    ):
      with traced_for(platform), bench.exact_products(dtype):
        self.assertEqual(jax.config.jax_default_matmul_precision, precision)


class ExactTest(parameterized.TestCase):
  @parameterized.parameters(
    (1e-6, 9e-6, "float32", None),
    (3e-6, 0.0, "float32", "outputs 3.*e-06 is above 2e-06"),
    (1e-6, 2e-5, "float32", "gradients 2.0e-05 is above 1e-05"),
    (1e-2, 1e-2, "bfloat16", None),
    (0.0, math.nan, "bfloat16", "gradients nan is above 2e-02"),
  )
  def test_fault_names_what_is_above_its_limit(
    self, outputs, gradients, dtype, expected
  ):
    found = [1 + jnp.full(1, error) for error in (outputs, gradients)]
    _, fault = bench.check_exact(found, [jnp.ones(1)] * 2, dtype)
    if expected is None:
      self.assertIsNone(fault)
    else:
      self.assertRegex(fault, f"^relative error of the {expected}$")

  def test_error_is_the_worst_of_a_tree_by_each_array_s_largest_value(self):
    tree = {"a": jnp.array([1.0, -200.0]), "b": jnp.array([4.0])}
    off = {"a": jnp.array([3.0, -200.0]), "b": jnp.array([3.0])}
    half = jnp.full(3, 0.5, jnp.bfloat16)  # absolute, where zeros are expected
    for found, expected, largest in (
      ((off, ()), (tree, ()), 0.25),
      ((half, ()), (jnp.zeros(3), ()), 0.5),
      ((tree, off), (tree, tree), 0.25),
    ):
      error, _ = bench.check_exact(found, expected, "float32")
      self.assertAlmostEqual(error, largest)


class TurnsTest(parameterized.TestCase):
  """Programs "a", "b", ... that last so many seconds each time."""

  def _timed(self, time, seconds, *args, loops=1, **options):
    """What a function of programs measures, and their calls in order."""
    now, order = [0.0], []

    def call(name, lasts):
      now[0] += next(lasts)
      order.append(name)

    programs = {
      name: bench.Program(functools.partial(call, name, iter(lasts)), loops, 7)
      for name, lasts in seconds.items()
    }
    with mock.patch.object(bench.time, "perf_counter", lambda: now[0]):
      return time(programs, *args, **options), "".join(order)

  def test_median_and_ratios_are_those_of_turns_after_one_to_warm_up(self):
    for seconds, loops, median, spread in (
      ([9, 1, 2, 3, 4, 5], 1, 3.0, (4.5 - 1.5) / 3.0),
      *(([9, 2], 1, 2.0, 0.0), ([9, 2, 4, 6], 4, 1.0, 1.0)),
    ):
      count = len(seconds) - 1
      times, _ = self._timed(
        bench.interleaved, {"a": seconds}, count, loops=loops
      )
      self.assertEqual(times, {"a": bench.Timing(median, spread)})
    # The machine is three times as slow in the second turn.
    seconds = {"a": [9, 1, 3, 1], "b": [9, 2, 6, 2]}
    times, order = self._timed(bench.interleaved, seconds, 3)
    self.assertEqual(order, "ab" + "ababab")
    self.assertEqual(times["a"].over(times["b"]), bench.Timing(0.5, 0.0))
    self.assertGreater(times["a"].spread, 1)

  def test_short_calls_are_repeated_in_a_turn_after_one_to_warm_up(self):
    a, b = itertools.repeat(0.3), itertools.repeat(2.0)
    time = functools.partial(self._timed, bench.interleaved, min_seconds=1.0)
    times, order = time({"a": a, "b": b}, 2)
    self.assertEqual(order, "aabb" + "aaaaab" * 2)
    self.assertAlmostEqual(times["a"].median, 0.3)
    _, order = time({"a": itertools.repeat(1e-9)}, 1)
    self.assertLess(len(order), 2000)

  def test_rows_are_compared_with_the_fastest_multi_head_attention(self):
    def rows(programs, mha):
      programs = [*programs.values(), None]
      return bench.time_rows(
        known[-len(programs) :], programs, mha=mha, units=32, rounds=3
      )

    known = [_ROW] * 3
    known += [bench.Row("cpu", "attention", "forward", 1, 1.0, "x", fault="no")]
    seconds = {n: itertools.repeat(s) for n, s in zip("abc", (4.0, 2.0, 1.0))}
    found, _ = self._timed(rows, seconds, (0, 1, 3), loops=2)
    measured = {"spread": 0.0, "ratio_spread": 0.0, "compile_seconds": None}
    for row, name, ratio, ms, rate in (
      (found[0], "packed", 2.0, 2e3, 16),
      (found[1], "mha", 1.0, 1e3, 32),
      (found[2], "packed", 0.5, 500, 64),
    ):
      measured |= {"implementation": name, "ratio_to_mha": ratio, "ms": ms}
      measured |= {"units_per_second": rate, "peak_bytes": 7}
      self.assertEqual(row, dataclasses.replace(_ROW, **measured))
    self.assertEqual(found[3], known[3])  # it was not compiled
    found, _ = self._timed(rows, {"a": itertools.repeat(1.0)}, ())
    self.assertEqual(found[0].ratio_to_mha, _ROW.ratio_to_mha)
