"""FLOPs of steps against figures of the papers and by hand."""

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
