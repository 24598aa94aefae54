"""FLOPs of steps against figures of the papers and by hand; peaks."""

import dataclasses

import pytest
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.cli.bench import bench_run
from moh_jax.data.infer import resolve
from moh_jax.training import flops
from tests.training import tiny


def _run(model, batch=1, length=None):
  run = resolve(bench_run(model, batch))
  return config_lib.apply_overrides(
    run, "data", **({"sequence_length": length} if length else {})
  )


def _flops(*args):
  return flops.step_flops(_run(*args))


class PublishedPeakTest(parameterized.TestCase):
  def test_is_that_of_the_kind(self):
    for kind, expected in {
      "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
      "NVIDIA A100-SXM4-40GB": 312e12, "A100-SXM-80GB": 312e12,
      "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12,
      "NVIDIA GeForce RTX 4090": 165.2e12, "TPU v5 lite": 197e12,
      "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12,
      "TPU v4": 275e12, "TPU7x": 1153.5e12,
    }.items():  # fmt: skip
      self.assertEqual(flops.published_peak(kind), expected, kind)
    # Other devices whose names hold one of the table, and a part of one.
    for kind in (
      "cpu", "NVIDIA RTX A1000", "NVIDIA A100X", "NVIDIA GB200",
      "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
      "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM2e",
      "NVIDIA A100-SXM-64GB", "NVIDIA A100-4-20C", "AMD Instinct MI300X",
      "TPU v4 lite",
    ):  # fmt: skip
      self.assertIsNone(flops.published_peak(kind), kind)


class TrainFlopsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Multiplications and additions of a forward pass, in 1e9: arXiv:2212.09748
    # and 2311.17132; the window's products of the latter are not counted.
    ("dit-xl2", 118.6, 0.001),
    ("transnext-base", 18.4, 0.03),
  )
  @pytest.mark.integration
  def test_published_figures(self, name, expected, tolerance):
    found = _flops(config_lib.released_model(name)) / 3 / 2 / 1e9
    self.assertAlmostEqual(found, expected, delta=expected * tolerance)

  def test_language_model_by_hand(self):
    model = dataclasses.replace(tiny.LLM, loss_chunk=4)
    batch, length = 2, 16
    tokens, seen = batch * length, (length + 1) / 2
    # Of 4 heads 3 are active; 2 have keys and values.
    layer = 2 * model.width * model.head_dim * (2 * 3 + 2 * 2)
    layer += 2 * model.width * model.mlp_dim * 3
    # Scores of three routed heads and of two groups.
    layer += 2 * model.width * (3 + 2)
    products = 2 * layer + 2 * model.width * model.vocab_size
    keys = 2 * 4 * model.head_dim  # two layers, for each head and key
    found = _flops(model, batch, length)
    self.assertEqual(found, 3 * tokens * (products + 3 * seen * keys))
