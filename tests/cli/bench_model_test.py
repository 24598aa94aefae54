"""`bench model` of tiny models."""

import dataclasses
import math
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from moh_jax.cli import bench_model
from moh_jax.cli.arguments.speed import ModelOptions, bench_run
from tests.training import tiny

_ONE_LAYER = {"num_heads": (4,), "shared_heads": (1,), "top_k": (2,)}
_MODELS = {
  "dit": dataclasses.replace(tiny.DIT, **_ONE_LAYER),
  "llm": dataclasses.replace(tiny.LLM, **_ONE_LAYER),
}


class ModelOptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"model": "moh-vit-s81"}, "'moh-vit-s81' must be one of"),
    ({"batch": 0}, "--batch 0 must be at least 1"),
    ({"implementations": ("fast",)}, "--implementations 'fast' must be one of"),
    ({"remat": "half"}, "remat='half' must be one of"),
    ({"model": "moh-llm-s-75", "lengths": (0,)}, "--lengths 0 must be at"),
    (
      {"model": "moh-llm-s-75", "lengths": (64, 4096)},
      r"--lengths 4096 must be in \[1, 2048\]",
    ),
  )
  def test_wrong_values_are_named_with_what_is_allowed(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      ModelOptions(**given)

  @parameterized.parameters(
    ("moh-llm-s-75", 0.75), ("moh-vit-b50", 0.5), ("moh-dit-s2-90", 8 / 9)
  )
  def test_variants_are_forms_of_the_model_and_its_baseline(self, name, share):
    forms = ("auto", "dense")
    options = ModelOptions(name, implementations=forms, dtype="bfloat16")
    variants = options.variants(options.runs()[0])
    self.assertEqual(list(variants), [*forms, "mha"])
    self.assertEqual({m.dtype for m in variants.values()}, {"bfloat16"})
    self.assertEqual(variants["dense"].attention_impl, "dense")
    self.assertEqual(variants["mha"].router.kind, "none")
    self.assertAlmostEqual(variants["auto"].activated_share, share, delta=0.005)
    self.assertEqual(variants["mha"].activated_share, 1.0)


class MeasureTest(parameterized.TestCase):
  def _measure(self, family, **given):
    config = bench_run(_MODELS[family], 1)
    with mock.patch.object(bench_model, "_BATCHES", (1,)):
      options = ModelOptions(config=config, batch=2, rounds=1, **given)
      return bench_model.measure(options)

  def _check_ratios(self, rows):
    for row in rows:
      (base,) = (
        other
        for other in rows
        if (other.mode, other.implementation) == (row.mode, "mha")
      )
      self.assertAlmostEqual(row.ratio_to_mha, row.ms / base.ms)
      self.assertTrue(math.isfinite(row.units_per_second))

  def test_language_model_is_scored_and_writes(self):
    result = self._measure("llm", lengths=(16,))
    rows = result["rows"]
    modes = ("forward", "forward_backward", "prefill_1", "decode_1")
    expected = [(m, form) for m in modes for form in ("auto", "mha")]
    expected.insert(2, ("forward", "router"))
    self.assertEqual([(r.mode, r.implementation) for r in rows], expected)
    self.assertEqual({row.length for row in rows}, {16})
    self.assertEqual([row.share for row in rows[:3]], [0.75, 1.0, 0.75])
    # 16 tokens are too few to leave heads out.
    named = {(r.form, r.computed_share) for r in rows if r.form}
    self.assertEqual(named, {("dense", 1.0)})
    self._check_ratios(rows)
    step = result["train_step"]
    self.assertGreater(step["params_bytes"], 0)
    self.assertGreaterEqual(step["optimizer_bytes"], 2 * step["params_bytes"])
    self.assertEqual(step["ema_bytes"], 0)
    self.assertGreater(result["peak_resident_bytes"], 0)

  def test_no_timed_call_of_decoding_reads_the_prompt(self):
    run = bench_run(_MODELS["llm"], 1)
    writer = bench_model._Writer(run, 1, 16)
    with mock.patch.object(writer, "prefill") as prefill:
      for _ in range(4):
        tokens = writer.decode()
    prefill.assert_not_called()
    self.assertEqual(tokens.shape, (1, bench_model._SPAN))
    self.assertEqual(int(writer._state.slot), 16 + bench_model._SPAN)

  @pytest.mark.slow
  def test_diffusion_model_is_sampled(self):
    result = self._measure("dit", sampler_steps=2)
    rows = result["rows"]
    self.assertEqual({r.mode for r in rows}, {"forward", "forward_backward"})
    self.assertTrue(all(row.peak_bytes > 0 for row in rows))
    self._check_ratios(rows)
    sampler = result["sampler"]
    self.assertAlmostEqual(
      sampler["ratio_to_forwards"], sampler["ms"] / 2 / sampler["forward_ms"]
    )

  def test_train_step_alone(self):
    result = self._measure("llm", lengths=(16,), compile_only=True)
    self.assertEmpty(result["rows"])
    self.assertGreater(result["train_step"]["compile_seconds"], 0)


if __name__ == "__main__":
  absltest.main()
