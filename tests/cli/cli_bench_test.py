"""`bench`: models beside their baselines, and inputs beside their steps."""

import dataclasses
import math
from unittest import mock

import pytest
from absl.testing import absltest

from moh_jax.cli import bench
from moh_jax.config.parse import changed
from moh_jax.data.infer import resolve
from tests.cli import tiny_checkpoint
from tests.training import tiny


class ModelTest(absltest.TestCase):
  def test_a_config_says_the_model(self):
    argv = "--config", "tests/faults/tiny_run.py:llm", "--rounds=3"
    with mock.patch.object(bench, "measure_model", return_value=[]) as run:
      tiny_checkpoint.done("bench", "model", *argv)
    config, rounds = run.call_args.args
    self.assertEqual((config.model, rounds), (tiny.LLM, 3))
    self.assertEqual(config.data.batch_size, 4)

  @pytest.mark.integration
  def test_every_pass_has_a_row(self):
    layer = {"num_heads": (4,), "shared_heads": (1,), "top_k": (2,)}
    llm = bench.bench_run(dataclasses.replace(tiny.LLM, **layer), 2)
    training = ["forward", "forward_backward"]
    for run, modes in (
      (changed(llm, ("data.sequence_length=16",)), ["prefill", "decode_1"]),
      (resolve(bench.bench_run(tiny.DIT, 2)), ["sampling_step"]),
    ):
      with mock.patch.object(bench, "_TEXTS", (1,)):
        rows = bench.measure_model(run, 1)
      self.assertEqual([row["mode"] for row in rows], training + modes)
      for row in rows:
        self.assertAlmostEqual(row["ratio"], row["ms"] / row["mha_ms"])
        self.assertTrue(math.isfinite(row["units_per_second"]))


class InputTest(tiny_checkpoint.CommandTest):
  COMMAND = "bench input --config tests/faults/tiny_run.py:vit"

  @pytest.mark.integration
  def test_the_slower_of_input_and_step_is_named(self):
    measured = self.report()
    rates = measured["examples_per_second"]
    self.assertGreater(min(rates.values()), 0)
    self.assertEqual(measured["bottleneck"], min(rates, key=rates.get))
