import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention_forms import Form
from moh_jax.speed import compare
from moh_jax.speed.compare import Contest, Variant
from moh_jax.speed.programs import Program
from moh_jax.speed.report import Row
from moh_jax.speed.timing import Timing


def _measure(variants, seconds, **options):
  """Rows of variants whose calls take so many seconds."""

  def interleaved(calls, rounds, min_seconds):
    del rounds, min_seconds
    return {n: Timing(s, 0.1, (s, s)) for n, s in zip(calls, seconds)}

  with mock.patch.object(compare.timing, "interleaved", interleaved):
    return compare.measure(
      variants,
      op="attention",
      mode="forward",
      length=16,
      units=32,
      rounds=3,
      **options,
    )


def _variant(implementation, share=0.5, mha=False, loops=1, **options):
  program = Program(lambda: None, loops, bytes=7, temporary_bytes=3)
  return Variant(implementation, share, program, mha, **options)


class MeasureTest(absltest.TestCase):
  def test_row_has_every_measurement(self):
    variant = _variant(
      "packed",
      loops=4,
      flops=100.0,
      max_error=1e-7,
      form="blocked",
      computed=0.5,
      moved=80,
    )
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
      ratio_to_mha=0.4,
      ratio_spread=0.0,
      form="blocked",
      computed_share=0.5,
      units_per_second=160.0,
      flops=100.0,
      peak_bytes=7,
      max_error=1e-7,
      every_head=False,
      temporary_bytes=3,
      moved_bytes=80,
      moved_by="count",
      kernels={},
    )
    self.assertEqual(rows[1], expected)

  def test_ratios_are_to_the_fastest_multi_head_attention(self):
    variants = [
      _variant("dense", 1.0, mha=True),
      _variant("cudnn", 1.0, mha=True),
      _variant("dense"),
      _variant("packed", 0.75),
    ]
    rows = _measure(variants, [4, 2, 8, 1])
    found = [(r.implementation, r.share, r.ratio_to_mha) for r in rows]
    expected = [
      ("dense", 1.0, 2.0),
      ("mha", 1.0, 1.0),
      ("dense", 0.5, 4.0),
      ("packed", 0.75, 0.5),
    ]
    self.assertEqual(found, expected)
    self.assertEqual(rows[1].ms, 2e3)

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
    program = Program(lambda: None)
    (row,) = _measure([Variant("auto", 1.0, program)], [1])
    self.assertIsNone(row.flops)
    self.assertIsNone(row.peak_share)
    self.assertIsNone(row.max_error)
    self.assertIsNone(row.ratio_to_mha)

  def test_what_did_not_run_has_no_time(self):
    failed = Variant("kernel", 0.5, None, fault="does not run")
    compiled = Variant("packed", 0.5, Program(None, bytes=5), flops=3.0)
    variants = [failed, compiled, _variant("dense", 1.0, True)]
    rows = _measure(variants, [1])
    self.assertEqual([row.ms for row in rows], [None, None, 1e3])
    self.assertEqual([row.fault for row in rows], ["does not run", None, None])
    self.assertEqual(rows[1].peak_bytes, 5)
    for row in rows[:2]:
      self.assertIsNone(row.ratio_to_mha)
      self.assertIsNone(row.rate)


class FormsTest(absltest.TestCase):
  def _contest(self, budget, **options):
    packs = budget is not None
    forms = {  # as on a GPU: "auto" is cuDNN's for all heads
      "dense": Form("dense"),
      "auto": Form("kernel", True, 64) if packs else Form("cudnn"),
      "kernel": Form("kernel", packs, 64),
      "cudnn": Form("cudnn", packs),
    }
    return Contest(
      budget,
      form=forms.get,
      evaluation=lambda name: lambda x: (x, ()),
      args=(jnp.ones(3),),
      flops=1.0,
      moved=lambda packs: 2.0 if packs else 4.0,
      **options,
    )

  def setUp(self):
    super().setUp()
    self.budget = HeadBudget(4, 1, 1, 8)
    self.options = mock.Mock(
      baselines=("dense", "auto", "cudnn", "kernel"),
      compared=("auto", "kernel", "cudnn"),
      dtype="float32",
    )

  def _entries(self, contest):
    return [name for name, _ in contest.entries(self.options)]

  def test_every_head_is_computed_once_by_each_form(self):
    baselines = ["dense", "auto", "kernel"]
    self.assertEqual(self._entries(self._contest(None)), baselines)
    compared = list(self.options.compared)
    self.assertEqual(self._entries(self._contest(self.budget)), compared)

  def test_cudnn_packs_as_a_form_and_not_as_a_baseline(self):
    contests = [self._contest(None), self._contest(self.budget)]
    variants = compare.compile_forms(self.options, contests)
    self.assertEqual({v.computed for v in variants if v.mha}, {1.0})
    cudnn = variants[-1]
    self.assertEqual((cudnn.form, cudnn.computed), ("cudnn", 0.5))
    self.assertEqual((cudnn.share, cudnn.moved), (0.5, 2.0))

  def test_a_form_that_fails_is_a_fault_of_its_own(self):
    def evaluation(name):
      def run(x):
        if name == "kernel":
          raise RuntimeError("too large")
        return x, ()

      return run

    contest = dataclasses.replace(
      self._contest(self.budget), evaluation=evaluation
    )
    faults = [
      (variant.implementation, variant.fault)
      for variant in compare.compile_forms(self.options, [contest])
    ]
    why = "does not run: RuntimeError: too large"
    self.assertEqual(faults, [("auto", None), ("kernel", why), ("cudnn", None)])


if __name__ == "__main__":
  absltest.main()
