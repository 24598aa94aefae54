"""Rows of measured programs, their table and how exact they are."""

import dataclasses
import math

import jax.numpy as jnp
from absl.testing import parameterized

from benchmarks import rows

_ROW = rows.Row(
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
    read = rows.read_rows({"rows": [stored]})
    self.assertEqual(read, [_ROW])
    (cells,), header = rows.table_cells(read)
    told = "forward 256 62.5% packed packed 62.5% 1.235 5% 0.68 ± 0.01 12.3 1.3"
    self.assertEqual(" ".join(map(str, cells)), f"{told} 1.5e-07")
    self.assertLen(header, len(cells))
    # A ratio has the decimals that its spread allows.
    for spread, expected in ((0.002, "0.6789 ± 0.0007"), (0.6, "0.7 ± 0.2")):
      row = dataclasses.replace(_ROW, ratio_spread=spread)
      self.assertEqual(row.to_mha, expected)


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
    _, fault = rows.check_exact(found, [jnp.ones(1)] * 2, dtype)
    if expected is None:
      self.assertIsNone(fault)
    else:
      self.assertRegex(fault, f"^relative error of the {expected}$")
