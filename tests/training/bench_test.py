"""Rows of timed programs, their table, programs, exactness, and turns."""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.cli import command
from moh_jax.training import bench
from moh_jax.training.bench import (
  Program,
  Row,
  Timing,
  check_exact,
  compile_program,
)
from tests.ops.devices import traced_for

_ROW = Row(
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
  def test_table_shows_every_figure_and_no_empty_column(self):
    mha = dataclasses.replace(_ROW, implementation="mha", share=1.0)
    text = command.table(*bench.table_cells([mha, _ROW]))
    head, _, last = (line.split() for line in text.splitlines())
    self.assertEqual(
      " ".join(head),
      "mode length share implementation form computed ms spread to MHA MB "
      "compile s max error",
    )
    self.assertEqual(
      " ".join(last),
      "forward 256 62.5% packed packed 62.5% 1.235 5% 0.68 ± 0.01 12.3 1.3 "
      "1.5e-07",
    )
    row = Row(
      *("cpu", "model", "forward", None, 0.625, "packed", 1.2, 0.05, 0.7, 0.0),
      units_per_second=1e5,
      peak_bytes=12,
    )
    other = dataclasses.replace(row, ratio_to_mha=None)
    cells, header = bench.table_cells([row, other])
    expected = "mode,share,implementation,ms,spread,to MHA,units/s,MB"
    self.assertEqual(header, expected.split(","))
    self.assertEqual([row[5] for row in cells], ["0.70", ""])

  @parameterized.parameters(
    (0.6789, 0.04, "0.68 ± 0.01"), (0.6789, 0.002, "0.6789 ± 0.0007"),
    (0.6789, 0.6, "0.7 ± 0.2"), (12.0, 0.4, "12 ± 2"), (0.6789, None, "0.68"),
  )  # fmt: skip
  def test_a_ratio_has_the_decimals_that_its_spread_allows(
    self, ratio, spread, expected
  ):
    row = dataclasses.replace(_ROW, ratio_to_mha=ratio, ratio_spread=spread)
    self.assertEqual(row.to_mha, expected)

  def test_rows_of_other_versions_are_read(self):
    stored = dataclasses.asdict(_ROW) | {"removed": 1}
    self.assertEqual(bench.read_rows({"rows": [stored]}), [_ROW])


def _row(implementation, share=0.5, **more):
  return Row("cpu", "attention", "forward", 16, share, implementation, **more)


class TimeRowsTest(absltest.TestCase):
  def _timed(self, rows, seconds, mha, **program):
    """Rows whose programs take so many seconds; None did not compile."""
    programs = [
      s and Program(lambda: None, bytes=7, **program) for s in seconds
    ]

    def interleaved(programs, rounds, min_seconds):
      del rounds, min_seconds
      return {i: Timing(seconds[i], 0.1, (seconds[i],) * 2) for i in programs}

    with mock.patch.object(bench, "interleaved", interleaved):
      return bench.time_rows(rows, programs, mha=mha, units=32, rounds=3)

  def test_a_row_keeps_what_is_known_and_gets_what_is_measured(self):
    known = _row("packed", max_error=1e-7)
    rows = self._timed([_row("dense", 1.0), known], [0.5, 0.2], [0], loops=4)
    measured = {
      **{"ms": 200.0, "spread": 0.1, "ratio_to_mha": 0.4, "ratio_spread": 0.0},
      **{"units_per_second": 160.0, "peak_bytes": 7},
    }
    self.assertEqual(rows[1], dataclasses.replace(known, **measured))
    (row,) = self._timed([known], [1], [])
    self.assertIsNone(row.ratio_to_mha)

  def test_ratios_are_to_the_fastest_multi_head_attention_that_ran(self):
    rows = [_row("dense", 1.0), _row("cudnn", 1.0), _row("dense")]
    rows += [_row("packed", 0.75), _row("kernel", fault="does not run")]
    found = self._timed(rows, [4, 2, 8, 1, None], [0, 1])
    self.assertEqual(
      [(r.implementation, r.share, r.ratio_to_mha, r.ms) for r in found],
      [
        ("dense", 1.0, 2.0, 4e3),
        ("mha", 1.0, 1.0, 2e3),
        ("dense", 0.5, 4.0, 8e3),
        ("packed", 0.75, 0.5, 1e3),
        ("kernel", 0.5, None, None),
      ],
    )
    self.assertEqual(found[-1].fault, "does not run")


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(
    ("cpu", True, 9.0, 1), ("gpu", True, 9.0, 16), ("gpu", True, 0.0, 1),
    ("gpu", False, 9.0, 1),
  )  # fmt: skip
  def test_accelerators_evaluate_short_functions_several_times_a_call(
    self, platform, asked, short, loops
  ):
    x, seen = jax.random.normal(jax.random.key(0), (3, 4)), []

    def function(x, _):
      jax.debug.callback(lambda: seen.append(0))
      return {"y": x @ x.T, "z": ()}

    with traced_for(platform), mock.patch.object(bench, "_SHORT", short):
      program = compile_program(function, x, None, loops=asked)
    self.assertEqual(program.loops, loops)
    self.assertGreater(program.compile_seconds, 0)
    jax.effects_barrier()
    seen.clear()
    chex.assert_trees_all_close(program.run()["y"], x @ x.T, rtol=1e-6)
    jax.effects_barrier()
    self.assertLen(seen, loops)

  def test_bytes_are_those_of_the_compiler(self):
    program = compile_program(lambda x: x + 1, jnp.ones((256, 256)))
    self.assertEqual(program.bytes, 2 * 4 * 256 * 256)

  def test_a_failure_is_one_line(self):
    def fail(x):
      raise RuntimeError("no such\nkernel")

    error = bench.attempt(compile_program, fail, jnp.zeros(3))
    said = "does not run: RuntimeError: no such kernel"
    self.assertEqual(bench.failure(error), said)

  @parameterized.parameters(
    ("cpu", "float32", None), ("gpu", "float32", "highest"),
    ("tpu", "bfloat16", None),
  )  # fmt: skip
  def test_accelerators_round_no_float32(self, platform, dtype, precision):
    with traced_for(platform), bench.exact_products(dtype):
      self.assertEqual(jax.config.jax_default_matmul_precision, precision)


class ExactTest(parameterized.TestCase):
  @parameterized.parameters(
    (1e-6, None, "float32", None),
    (3e-6, None, "float32", "outputs 3.*e-06 is above 2e-06"),
    (1e-6, 9e-6, "float32", None),
    (1e-6, 2e-5, "float32", "gradients 2.0e-05 is above 1e-05"),
    (1e-2, 1e-2, "bfloat16", None),
    (3e-2, 0.0, "bfloat16", "outputs 3.0e-02 is above 2e-02"),
    (math.nan, None, "float32", "outputs nan is above 2e-06"),
    (0.0, math.nan, "bfloat16", "gradients nan is above 2e-02"),
  )
  def test_fault_names_what_is_above_its_limit(
    self, outputs, gradients, dtype, expected
  ):
    errors = [[outputs], [] if gradients is None else [gradients]]
    ones = [[jnp.ones(1) for _ in part] for part in errors]
    found = [[1 + jnp.full(1, error) for error in part] for part in errors]
    error, fault = check_exact(found, ones, dtype)
    largest = np.max([x for part in errors for x in part])
    np.testing.assert_allclose(error, largest, rtol=0.1)
    if expected is None:
      self.assertIsNone(fault)
    else:
      self.assertRegex(fault, f"^relative error of the {expected}$")

  def test_error_is_the_worst_of_a_tree_by_each_array_s_largest_value(self):
    expected = {"a": jnp.array([1.0, -200.0]), "b": jnp.array([4.0])}
    found = {"a": jnp.array([3.0, -200.0]), "b": jnp.array([3.0])}
    error, _ = check_exact((found, ()), (expected, ()), "float32")
    self.assertAlmostEqual(error, 0.25)
    half = jnp.full(3, 0.5, jnp.bfloat16)  # absolute, where zeros are expected
    error, _ = check_exact((half, ()), (jnp.zeros(3), ()), "float32")
    self.assertEqual(error, 0.5)


class InterleavedTest(parameterized.TestCase):
  def _times(self, seconds, rounds, loops=1, **options):
    """Times programs "a", "b", ... that last so many seconds each time."""
    now, order = [0.0], []

    def call(name, lasts):
      now[0] += next(lasts)
      order.append(name)

    programs = {
      name: Program(functools.partial(call, name, iter(lasts)), loops)
      for name, lasts in seconds.items()
    }
    with mock.patch.object(bench.time, "perf_counter", lambda: now[0]):
      return bench.interleaved(programs, rounds, **options), "".join(order)

  @parameterized.parameters(
    ([9, 1, 2, 3, 4, 5], 1, Timing(3.0, (4.5 - 1.5) / 3.0)),
    ([9, 2], 1, Timing(2.0, 0.0)),
    ([9, 2, 4, 6], 4, Timing(1.0, 1.0)),
  )
  def test_median_and_spread_of_an_evaluation_after_one_to_warm_up(
    self, seconds, loops, expected
  ):
    times, _ = self._times({"a": seconds}, len(seconds) - 1, loops)
    self.assertEqual(times, {"a": expected})

  def test_ratios_are_between_calls_of_one_turn(self):
    # The machine is three times as slow in the second turn.
    seconds = {"a": [9, 1, 3, 1], "b": [9, 2, 6, 2]}
    times, order = self._times(seconds, 3)
    self.assertEqual(order, "ab" + "ababab")
    self.assertEqual(times["a"].over(times["b"]), Timing(0.5, 0.0))
    self.assertGreater(times["a"].spread, 1)

  def test_short_calls_are_repeated_in_a_turn_after_one_to_warm_up(self):
    seconds = {"a": itertools.repeat(0.3), "b": itertools.repeat(2.0)}
    times, order = self._times(seconds, 2, min_seconds=1.0)
    self.assertEqual(order, "aabb" + "aaaaab" * 2)
    self.assertAlmostEqual(times["a"].median, 0.3)
    _, order = self._times({"a": itertools.repeat(1e-9)}, 1, min_seconds=1.0)
    self.assertLess(len(order), 2000)
