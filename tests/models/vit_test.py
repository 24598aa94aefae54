"""The classifier: image sizes and stochastic depth."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import ViTConfig
from moh_jax.models.vit import ViT, drop_path_rates
from tests.models import small

_CONFIG = small.VIT


def _config(**changes) -> ViTConfig:
  return dataclasses.replace(_CONFIG, **changes)


class ImageSizeTest(parameterized.TestCase):
  @parameterized.parameters(
    {"image_size": (33, 47), "fixed_pool_size": 3},
    {"image_size": (24, 16), "window": 5, "pretrain_image_size": 16},
  )
  def test_runs_with_finite_logits(self, **changes):
    logits, aux = small.forward(_config(**changes))
    chex.assert_shape(logits, (small.B, 5))
    chex.assert_tree_all_finite((logits, aux))

  def test_size_does_not_change_the_parameters(self):
    other = _config(image_size=(33, 47), fixed_pool_size=3)
    chex.assert_trees_all_equal_shapes(
      small.random_variables(other), small.random_variables(_CONFIG)
    )

  def test_fixed_pool_of_the_ratios_size_changes_nothing(self):
    # A 4 x 4 grid over ratio 2 pools to 2 x 2 either way.
    chex.assert_trees_all_close(
      small.forward(_config(fixed_pool_size=2)),
      small.forward(_CONFIG),
      rtol=1e-5,
    )

  def test_pretraining_size_changes_the_position_bias(self):
    # The unit of distance is a share of the pre-training grid.
    logits, _ = small.forward(_config(pretrain_image_size=64))
    self.assertGreater(
      float(jnp.abs(logits - small.forward(_CONFIG)[0]).max()), 1e-4
    )


class DropPathTest(absltest.TestCase):
  def test_rates_rise_linearly_over_all_blocks(self):
    rates = drop_path_rates(_config(drop_path=0.4))
    self.assertLen(rates, 2)
    np.testing.assert_allclose(rates[0], [0.0, 0.2], atol=1e-7)
    np.testing.assert_allclose(rates[1], [0.4], atol=1e-7)

  def test_training_drops_and_evaluation_does_not(self):
    config = _config(drop_path=0.9)
    variables, (images,) = small.random_variables(config), small.inputs(config)

    @functools.partial(jax.jit, static_argnames="train")
    def logits(key, train):
      rngs = {"dropout": key}
      return ViT(config).apply(variables, images, train=train, rngs=rngs)[0]

    keys = [jax.random.key(seed) for seed in range(4)]
    trained = [np.asarray(logits(key, train=True)) for key in keys]
    chex.assert_trees_all_equal(trained[0], logits(keys[0], train=True))
    self.assertGreater(max(abs(x - trained[0]).max() for x in trained), 1e-3)
    evaluated, _ = small.forward(_CONFIG)
    np.testing.assert_allclose(
      logits(keys[0], train=False), evaluated, rtol=1e-5, atol=1e-5
    )
