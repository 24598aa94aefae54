"""The classifier: shapes, image sizes, remat, precision, router off.

Its numbers are held against the public releases in tests/parity.
"""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import RouterConfig, ViTConfig, without_router
from moh_jax.models.vit import ViT, drop_path_rates

# A pooled stage of two blocks and a full one; 2 + 3 active of 2 x 2 + 4 heads.
_CONFIG = ViTConfig(
  image_size=(16, 16),
  channels=1,
  num_classes=5,
  patch_stride=4,
  embed_dims=(8, 16),
  depths=(2, 1),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(0, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
)
_B = 2


def _config(**changes) -> ViTConfig:
  return dataclasses.replace(_CONFIG, **changes)


def _images(config: ViTConfig) -> jax.Array:
  shape = (_B, *config.image_size, config.channels)
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@functools.cache
def _variables(config: ViTConfig):
  """Random parameters, larger than the initial ones."""
  init = functools.partial(ViT(config).init, jax.random.key(0))
  shapes = nn.unbox(jax.eval_shape(init, _images(config)))["params"]
  rng = np.random.default_rng(1)

  def draw(path, x):
    offset = 1.0 if path[-1].key == "scale" else 0.0
    return jnp.asarray(rng.normal(size=x.shape) / 5 + offset, x.dtype)

  return {"params": jax.tree_util.tree_map_with_path(draw, shapes)}


@functools.cache
def _run(config: ViTConfig):
  """Logits, side values and gradients, compiled once per config."""
  images = _images(config)

  def loss(variables):
    logits, aux = ViT(config).apply(variables, images)
    total = jnp.sum(jnp.sin(logits)) + aux.balance_loss
    return total, (logits, aux)

  call = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, outputs), grads = call(_variables(config))
  return *outputs, grads


@functools.cache
def _forward(config: ViTConfig):
  return jax.jit(ViT(config).apply)(_variables(config), _images(config))


@functools.cache
def _checkpoints(config: ViTConfig) -> int:
  """Equations of the gradient that recompute something."""

  def loss(variables):
    return ViT(config).apply(variables, _images(config))[0].sum()

  jaxpr = jax.make_jaxpr(jax.grad(loss))(_variables(config))
  return str(jaxpr).count("prevent_cse")


class ViTTest(parameterized.TestCase):
  def test_shapes_and_float32(self):
    logits, aux, grads = _run(_CONFIG)
    chex.assert_shape(logits, (_B, 5))
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_shape(aux.layers["stage1"].load, (2, 2))
    chex.assert_shape(aux.layers["stage2"].load, (1, 4))
    chex.assert_type(jax.tree.leaves((logits, aux, grads)), jnp.float32)

  def test_side_values_count_routed_layers_and_all_heads(self):
    _, aux, _ = _run(_CONFIG)
    np.testing.assert_allclose(
      aux.balance_loss, aux.layers["stage2"].balance_loss[0], rtol=1e-6
    )
    self.assertGreater(float(aux.balance_loss), 0.5)
    np.testing.assert_allclose(aux.activated_share, (2 * 1 + 3) / (2 * 2 + 4))

  def test_gradients_are_finite_and_reach_every_module(self):
    _, _, grads = _run(_CONFIG)
    chex.assert_tree_all_finite(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      # A constant on all logits of a full attention changes nothing.
      if "stage2" in name and "cpb" in name and name.endswith("['bias']"):
        continue
      self.assertGreater(np.abs(leaf).max(), 0.0, name)

  def test_remat_recomputes_and_gives_equal_gradients(self):
    config = _config(remat="dots")
    chex.assert_trees_all_close(
      _run(config), _run(_CONFIG), rtol=1e-4, atol=1e-4
    )
    self.assertEqual(_checkpoints(_CONFIG), 0)
    self.assertGreater(_checkpoints(config), 0)

  def test_bfloat16_is_close_and_parameters_stay_float32(self):
    config = _config(dtype="bfloat16")
    logits, aux, grads = _run(config)
    expected, _, _ = _run(_CONFIG)
    leaves = jax.tree.leaves((_variables(config), logits, aux, grads))
    chex.assert_type(leaves, jnp.float32)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(logits, expected, atol=0.05 * scale)
    self.assertGreater(float(jnp.abs(logits - expected).max()), 0.0)

  def test_records_stage_outputs_and_routing(self):
    apply = functools.partial(ViT(_CONFIG).apply, mutable=["intermediates"])
    _, recorded = jax.eval_shape(apply, _variables(_CONFIG), _images(_CONFIG))
    recorded = recorded["intermediates"]
    chex.assert_shape(recorded["stage1_out"][0], (_B, 16, 8))
    chex.assert_shape(recorded["stage2_out"][0], (_B, 4, 16))
    (routing,) = recorded["stage1"]["blocks"]["attn"]["router"]["routing"]
    chex.assert_shape(routing.gates, (2, _B, 16, 2))


class ImageSizeTest(parameterized.TestCase):
  @parameterized.parameters(
    {"image_size": (33, 47), "fixed_pool_size": 3},
    {"image_size": (24, 16), "window": 5, "pretrain_image_size": 16},
  )
  def test_runs_with_finite_logits(self, **changes):
    logits, aux = _forward(_config(**changes))
    chex.assert_shape(logits, (_B, 5))
    chex.assert_tree_all_finite((logits, aux))

  def test_size_does_not_change_the_parameters(self):
    other = _config(image_size=(33, 47), fixed_pool_size=3)
    chex.assert_trees_all_equal_shapes(_variables(other), _variables(_CONFIG))

  def test_fixed_pool_of_the_ratios_size_changes_nothing(self):
    # A 4 x 4 grid over ratio 2 pools to 2 x 2 either way.
    chex.assert_trees_all_close(
      _forward(_config(fixed_pool_size=2)), _forward(_CONFIG), rtol=1e-5
    )

  def test_pretraining_size_changes_the_position_bias(self):
    # The unit of distance is a share of the pre-training grid.
    logits, _ = _forward(_config(pretrain_image_size=64))
    self.assertGreater(
      float(jnp.abs(logits - _forward(_CONFIG)[0]).max()), 1e-4
    )

  @parameterized.parameters(((2, 16, 20, 1),), ((16, 16, 1),))
  def test_images_of_another_shape_raise(self, shape):
    with self.assertRaisesRegex(ValueError, r"must be \[batch, 16, 16, 1\]"):
      ViT(_CONFIG).init(jax.random.key(0), jnp.zeros(shape))


class RouterOffTest(parameterized.TestCase):
  @parameterized.parameters(
    without_router(_CONFIG), _config(router=RouterConfig("none"))
  )
  def test_activates_every_head_and_costs_nothing(self, config):
    for stage in ("stage1", "stage2"):
      blocks = _variables(config)["params"][stage]["blocks"]
      self.assertNotIn("router", blocks["attn"])
    logits, aux = _forward(config)
    chex.assert_tree_all_finite(logits)
    self.assertEqual(float(aux.activated_share), 1.0)
    self.assertEqual(float(aux.balance_loss), 0.0)


class DropPathTest(absltest.TestCase):
  def test_rates_rise_linearly_over_all_blocks(self):
    rates = drop_path_rates(_config(drop_path=0.4))
    self.assertLen(rates, 2)
    np.testing.assert_allclose(rates[0], [0.0, 0.2], atol=1e-7)
    np.testing.assert_allclose(rates[1], [0.4], atol=1e-7)

  def test_training_drops_and_evaluation_does_not(self):
    config = _config(drop_path=0.9)
    variables, images = _variables(config), _images(config)

    @functools.partial(jax.jit, static_argnames="train")
    def logits(key, train):
      rngs = {"dropout": key}
      return ViT(config).apply(variables, images, train=train, rngs=rngs)[0]

    keys = [jax.random.key(seed) for seed in range(4)]
    trained = [np.asarray(logits(key, train=True)) for key in keys]
    chex.assert_trees_all_equal(trained[0], logits(keys[0], train=True))
    self.assertGreater(max(abs(x - trained[0]).max() for x in trained), 1e-3)
    evaluated, _ = _forward(_CONFIG)
    np.testing.assert_allclose(
      logits(keys[0], train=False), evaluated, rtol=1e-5, atol=1e-5
    )
