"""From measured ratios to entries of the table of crossovers."""

from absl.testing import absltest, parameterized

from moh_jax.ops import crossovers as table
from moh_jax.ops.crossovers import LENGTHS, Crossover, largest_share
from moh_jax.ops.target import Target
from moh_jax.speed.card.crossing import Measured, crossing, crossovers, lines
from moh_jax.speed.report import Row


def _row(length, share, ratio, form="cudnn", mode="forward", **changes):
  fields = {"every_head": False, "ratio_to_mha": ratio, **changes}
  return Row("NVIDIA X", "attention", mode, length, share, form, **fields)


class CrossingTest(parameterized.TestCase):
  @parameterized.parameters(
    ([(0.5, 0.6), (0.75, 0.9), (0.9, 1.2)], 0.8),
    ([(0.9, 1.2), (0.5, 0.6), (0.75, 0.9)], 0.8),  # in any order
    ([(0.5, 1.2), (0.75, 1.8)], 0.42),  # below all
    ([(0.5, 0.5), (0.75, 0.75), (0.9, 0.9)], 1.0),  # above all
    ([(0.5, 3.0), (0.75, 3.1)], 0.0),
    ([(0.5, 0.1), (0.75, 0.2)], 1.0),
    ([(0.5, 1.0), (0.75, 1.5)], 0.5),
    ([(0.5, 0.9)], 0.5),
    ([(0.5, 1.1)], 0.0),
    ([(0.5, 0.9), (0.75, 0.8)], 0.75),  # noise
    ([(0.5, 1.2), (0.75, 1.1)], 0.0),
  )
  def test_is_where_the_ratio_is_one(self, points, expected):
    self.assertAlmostEqual(crossing(points), expected, places=2)


class CrossoversTest(absltest.TestCase):
  def _entries(self, rows, backends=None):
    measured = [Measured(64, "bfloat16", rows)]
    return crossovers(measured, backends or {"cudnn": "cudnn"})

  def test_lengths_that_were_not_measured_are_filled_in(self):
    rows = [
      _row(512, 0.5, 1.0),
      _row(512, 0.75, 1.5),
      _row(2048, 0.5, 0.7),
      _row(2048, 0.75, 0.95),
      _row(2048, 0.9, 1.1),
    ]
    (entry,) = self._entries(rows)
    self.assertEqual(LENGTHS[:4], (256, 512, 1024, 2048))
    # The crossing at 2,048 is at 0.8; 1,024 is half way there from 512.
    shares = (0.0, 0.5, 0.65, 0.8, 0.8, 0.8, 0.8)
    expected = Crossover(
      "NVIDIA X", "cudnn", ("bfloat16",), 64, False, shares, True
    )
    self.assertEqual(entry, expected)

  def test_packing_pays_in_both_passes(self):
    rows = [
      _row(256, 0.5, 0.5),
      _row(256, 0.75, 1.0),
      _row(256, 0.5, 0.75, mode="forward_backward"),
      _row(256, 0.75, 1.25, mode="forward_backward"),
    ]
    (entry,) = self._entries(rows)
    self.assertAlmostEqual(entry.shares[0], 0.62, delta=0.01)

  def test_causal_has_an_entry_of_its_own(self):
    rows = [
      _row(256, share, share + 0.1, form, mode)
      for share in (0.5, 0.75)
      for form, mode in (
        ("cudnn", "forward"),
        ("kernel", "forward"),
        ("kernel", "causal"),
      )
    ]
    entries = self._entries(rows, {"cudnn": "cudnn", "kernel": "mosaic_gpu"})
    self.assertEqual(
      [(entry.backend, entry.causal) for entry in entries],
      [("cudnn", False), ("mosaic_gpu", False), ("mosaic_gpu", True)],
    )

  def test_rows_that_tell_nothing_are_left_out(self):
    rows = [
      _row(256, 0.5, 0.5, every_head=True),
      _row(256, 0.5, None),
      _row(256, 0.5, 0.5, fault="relative error"),
      _row(256, 0.5, 0.5, form="auto"),
    ]
    self.assertEqual(self._entries(rows), [])

  def test_printed_lines_are_entries_that_the_library_uses(self):
    rows = [_row(256, 0.5, 0.6), _row(256, 0.75, 1.1)]
    (line,) = lines(self._entries(rows))
    (entry,) = eval(f"({line})", {"Crossover": Crossover})
    before, table.CROSSOVERS = table.CROSSOVERS, (entry, *table.CROSSOVERS)
    try:
      share = largest_share(
        Target("gpu", "NVIDIA X"), "cudnn", "bfloat16", 64, 256, causal=False
      )
    finally:
      table.CROSSOVERS = before
    self.assertEqual(share, 0.7)


if __name__ == "__main__":
  absltest.main()
