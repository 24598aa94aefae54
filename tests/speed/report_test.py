import dataclasses
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.cli import common
from moh_jax.speed import report
from moh_jax.speed.report import Row

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
  flops=2.5e9,
  peak_share=0.41,
  peak_bytes=12_340_000,
  max_error=1.5e-7,
  every_head=False,
  temporary_bytes=2_340_000,
  moved_bytes=5_600_000,
  moved_by="count",
  memory_share=0.55,
  kernels={"triton": 2},
)
_MHA = dataclasses.replace(_ROW, implementation="mha", share=1.0)


class TableTest(parameterized.TestCase):
  def test_table_shows_every_figure(self):
    text = common.table(*report.table_cells([_MHA, _ROW]))
    head, _, last = (line.split() for line in text.splitlines())
    self.assertEqual(
      " ".join(head),
      "mode length share implementation form computed ms spread to MHA GFLOP "
      "of peak MB temp MB moved MB of memory kernels max error",
    )
    self.assertEqual(
      " ".join(last),
      "forward 256 62.5% packed packed 62.5% 1.235 5% 0.68 ± 0.01 2.500 41.0% "
      "12.3 2.3 ~5.6 55.0% 2 triton 1.5e-07",
    )

  def test_columns_of_no_row_are_left_out(self):
    row = Row(
      *("cpu", "model", "forward", None, 0.625, "packed"),
      *(1.2, 0.05, 0.7, 0.0),
      units_per_second=1e5,
      peak_bytes=12,
    )
    other = dataclasses.replace(row, ratio_to_mha=None)
    cells, header = report.table_cells([row, other])
    self.assertEqual(
      header,
      [
        *("mode", "share", "implementation", "ms", "spread"),
        *("to MHA", "units/s", "MB"),
      ],
    )
    self.assertEqual([row[5] for row in cells], ["0.70", ""])

  @parameterized.parameters(
    (0.6789, 0.04, "0.68 ± 0.01"),
    (0.6789, 0.002, "0.6789 ± 0.0007"),
    (0.6789, 0.6, "0.7 ± 0.2"),
    (12.0, 0.4, "12 ± 2"),
    (0.6789, None, "0.68"),
  )
  def test_a_ratio_has_the_decimals_that_its_spread_allows(
    self, ratio, spread, expected
  ):
    row = dataclasses.replace(_ROW, ratio_to_mha=ratio, ratio_spread=spread)
    self.assertEqual(row.to_mha, expected)

  def test_no_row_is_above_the_peak(self):
    fast = dataclasses.replace(_ROW, ms=0.5)
    shares = [r.peak_share for r in report.with_peaks([_ROW, fast], 4e12, 1e10)]
    self.assertEqual(shares, [fast.ms / _ROW.ms, 1.0])
    (row,) = report.with_peaks([_ROW], 1e13, 1e10)
    self.assertAlmostEqual(row.peak_share, 2.5e9 / 1.23456e-3 / 1e13)
    self.assertAlmostEqual(row.memory_share, 5.6e6 / 1.23456e-3 / 1e10)

  def test_row_has_a_name(self):
    self.assertEqual(
      _ROW.name, "attention forward, length 256, share 62.5%, packed"
    )
    model = dataclasses.replace(_ROW, op="model", length=None)
    self.assertEqual(model.name, "model forward, share 62.5%, packed")


class MissingTest(absltest.TestCase):
  def test_missing_library_says_how_to_install_it(self):
    with (
      mock.patch.dict(sys.modules, {"matplotlib.figure": None}),
      self.assertRaisesRegex(
        ValueError, r"--plot needs .*'matplotlib': pip install 'moh_jax\[plot"
      ),
    ):
      report.check_plot("a.png")


class PlotTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_plot_is_an_image(self):
    lengths = [
      dataclasses.replace(row, length=n, mode=mode)
      for row in (_MHA, _ROW)
      for n in (256, 1024)
      for mode in ("forward", "causal")
    ]
    for name, rows in (("a.png", lengths), ("b.png", [_ROW])):
      report.plot(rows, str(self.root / name))
    with (
      Image.open(self.root / "a.png") as two_modes,
      Image.open(self.root / "b.png") as one,
    ):
      self.assertGreater(two_modes.width, one.width)

  def test_rows_without_a_time_are_left_out(self):
    compiled = Row("h100", "attention", "causal", 256, 0.5, "kernel")
    for rows in ([_ROW], [_ROW, compiled]):
      report.plot(rows, str(self.root / f"{len(rows)}.png"))
    with (
      Image.open(self.root / "1.png") as alone,
      Image.open(self.root / "2.png") as both,
    ):
      self.assertEqual(alone.size, both.size)

  def test_models_without_a_length_are_drawn(self):
    row = dataclasses.replace(_ROW, op="model", length=None)
    report.plot([row], str(self.root / "a.svg"))
    self.assertIn("packed", (self.root / "a.svg").read_text())

  @parameterized.parameters(
    ("a.bench", ValueError, r"--plot .*a.bench must end in one of .*\.png"),
    ("a", ValueError, "must end in one of"),
    ("nope/a.png", FileNotFoundError, "--plot .*nope is no folder"),
  )
  def test_what_cannot_be_written_is_named(self, name, error, message):
    with self.assertRaisesRegex(error, message):
      report.check_plot(str(self.root / name))

  def test_what_can_be_written_passes(self):
    report.check_plot(str(self.root / "a.PNG"))
    report.check_plot("a.pdf")


if __name__ == "__main__":
  absltest.main()
