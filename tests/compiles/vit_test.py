"""The training step of MoH-ViT in bfloat16, lowered for a GPU.

Run with `pytest -n 0 -m compiles tests/compiles`.
"""

import dataclasses

import pytest
from absl.testing import absltest, parameterized

from moh_jax.cli.bench import bench_run
from moh_jax.config import released_model
from tests.compiles import programs

pytestmark = pytest.mark.compiles


class TrainingStepTest(parameterized.TestCase):
  @parameterized.parameters((224, 0), (384, 3))
  def test_last_stage_is_cudnns_where_it_has_gradients(self, side, calls):
    # Its 49 or 144 tokens attend with a bias: forward, once more for the
    # gradients, and backward.
    model = dataclasses.replace(
      released_model("moh-vit-s80"),
      image_size=(side, side),
      pretrain_image_size=224,
      depths=(1, 1, 1, 1),
      dtype="bfloat16",
    )
    run = bench_run(model, 8)
    text = programs.lower_step(run, "h100:1").as_text()
    self.assertEqual(text.count("__cudnn$"), calls)


if __name__ == "__main__":
  absltest.main()
