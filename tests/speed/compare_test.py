from unittest import mock

import jax
from absl.testing import absltest

from moh_jax.speed import compare
from moh_jax.speed.compare import Variant
from moh_jax.speed.programs import Program
from moh_jax.speed.report import Row
from moh_jax.speed.timing import Timing


def _measure(variants, seconds, **options):
  """Rows of variants whose calls take so many seconds."""

  def interleaved(calls, rounds, min_seconds):
    del rounds, min_seconds
    return {n: Timing(s, 0.1) for n, s in zip(calls, seconds)}

  with mock.patch.object(compare.timing, "interleaved", interleaved):
    return compare.measure(
      variants,
      op="attention",
      mode="forward",
      length=16,
      units=32,
      rounds=3,
      peak=1e6,
      **options,
    )


def _variant(implementation, share=0.5, mha=False, loops=1, **options):
  program = Program(lambda: None, loops, bytes=7)
  return Variant(implementation, share, program, mha, **options)


class MeasureTest(absltest.TestCase):
  def test_row_has_every_measurement(self):
    variant = _variant("packed", loops=4, flops=100.0, max_error=1e-7)
    rows = _measure([_variant("dense", 1.0, True), variant], [0.5, 0.8])
    expected = Row(
      device=jax.devices()[0].device_kind,
      op="attention",
      mode="forward",
      length=16,
      share=0.5,
      implementation="packed",
      ms=200.0,  # of each of the call's four evaluations
      spread=0.1,
      ratio_to_dense=None,
      ratio_to_mha=0.4,
      units_per_second=160.0,
      flops=100.0,
      peak_share=0.0005,
      peak_bytes=7,
      max_error=1e-7,
    )
    self.assertEqual(rows[1], expected)

  def test_ratios_are_to_the_fastest_form_that_computes_every_head(self):
    variants = [
      _variant("dense", 1.0, mha=True),
      _variant("cudnn", 1.0, mha=True),
      _variant("dense"),
      _variant("cudnn"),
      _variant("packed"),
      _variant("dense", 0.75),
      _variant("packed", 0.75),
    ]
    rows = _measure(variants, [4, 2, 8, 5, 1, 10, 5])
    found = [
      (r.implementation, r.share, r.ratio_to_dense, r.ratio_to_mha)
      for r in rows
    ]
    expected = [
      ("mha", 1.0, 1.0, 1.0),
      ("dense", 0.5, 8 / 5, 4.0),
      ("cudnn", 0.5, 1.0, 2.5),
      ("packed", 0.5, 1 / 5, 0.5),
      ("dense", 0.75, 1.0, 5.0),
      ("packed", 0.75, 0.5, 2.5),
    ]
    self.assertEqual(found, expected)
    self.assertEqual(rows[0].ms, 2e3)

  def test_faults_of_the_variants_are_those_of_the_rows(self):
    variants = [
      _variant("dense", 1.0, True, max_error=0.0),
      _variant("packed", max_error=1e-3, fault="outputs 1.0e-03"),
    ]
    first, second = _measure(variants, [1, 1])
    self.assertIsNone(first.fault)
    self.assertEqual(second.fault, "outputs 1.0e-03")
    self.assertEqual(second.max_error, 1e-3)

  def test_what_is_not_counted_is_none(self):
    (row,) = _measure([_variant("auto", 1.0, True)], [1])
    self.assertIsNone(row.flops)
    self.assertIsNone(row.peak_share)
    self.assertIsNone(row.max_error)
    self.assertIsNone(row.ratio_to_dense)


if __name__ == "__main__":
  absltest.main()
