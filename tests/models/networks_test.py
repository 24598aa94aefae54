"""What the networks of all families have in common, and classifier and DiT.

Their numbers are held against the public releases in tests/parity.
"""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax.traverse_util import flatten_dict

from moh_jax.config import DiTConfig, ViTConfig, without_router
from moh_jax.evaluation.probe import recorded_layers
from moh_jax.layers.stack import collect_aux
from moh_jax.models.dit import DiT
from moh_jax.models.vit import ViT, drop_path_rates
from tests.models import small

# Config, shape of the output, layers of each stack.
_CASES = {
  "vit": (small.VIT, (2, 5), {"stage1": 2, "stage2": 1}),
  "dit": (small.DIT, (2, 4, 6, 6), {"blocks0": 2, "blocks1": 1}),
  "llm": (small.UNEQUAL, (2, 8, 60), {"blocks0": 1, "blocks1": 1}),
}


@parameterized.parameters(*_CASES)
class NetworksTest(parameterized.TestCase):
  def test_shapes_types_and_side_values(self, family):
    config, shape, stacks = _CASES[family]
    (out, aux), grads = small.gradient(config)
    chex.assert_shape(out, shape)
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_type(jax.tree.leaves((out, aux, grads)), jnp.float32)
    self.assertCountEqual(aux.layers, stacks)
    losses = []
    for (name, depth), group in zip(stacks.items(), config.layer_groups()):
      layers, budget = aux.layers[name], group.budget
      chex.assert_shape(layers.load, (depth, budget.num_heads))
      losses.append(layers.balance_loss[: depth * bool(budget.top_k)])
    expected = np.concatenate(losses).mean()
    np.testing.assert_allclose(aux.balance_loss, expected, rtol=1e-6)
    self.assertGreater(float(aux.balance_loss), 0.5)
    np.testing.assert_allclose(aux.activated_share, config.activated_share)
    listed = collect_aux([*aux.layers.values()])  # stacks without names
    np.testing.assert_allclose(listed.balance_loss, expected, rtol=1e-6)

  @pytest.mark.integration
  def test_gradients_are_finite_and_reach_every_parameter(self, family):
    _, grads = small.gradient(_CASES[family][0])
    chex.assert_tree_all_finite(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      # A constant on all logits of a full attention changes nothing.
      if not ("stage2" in name and "cpb" in name and "bias" in name):
        self.assertGreater(float(jnp.abs(leaf).max()), 0.0, name)

  @pytest.mark.integration
  def test_remat_recomputes_every_stack(self, family):
    config, _, stacks = _CASES[family]
    again = dataclasses.replace(config, remat="dots")
    for model, count in ((config, 0), (again, len(stacks))):
      arguments = small.random_variables(model), *small.inputs(model)
      program = jax.make_jaxpr(small.network(model).apply)(*arguments)
      # Those of activations, which MLPs always compute again, have no policy.
      text = str(program)
      found = text.count("prevent_cse") - text.count("policy=None")
      self.assertEqual(found, count)

  @pytest.mark.integration
  def test_bfloat16_is_close_and_router_and_results_are_float32(self, family):
    config = _CASES[family][0]
    half = dataclasses.replace(config, dtype="bfloat16")
    (out, aux), recorded = small.record(half)
    leaves = jax.tree.leaves((small.random_variables(half), out, aux))
    chex.assert_type(leaves, jnp.float32)
    for routing in recorded_layers(recorded, "routing", 3):
      chex.assert_type([routing.gates, routing.probs], jnp.float32)
      rounded = np.float32(routing.probs.astype(jnp.bfloat16))
      if routing.probs.shape[-1] > 1:  # else all are 1
        self.assertGreater(np.abs(rounded - routing.probs).max(), 1e-4)
    if family == "llm":  # or a rounding chooses another head
      config = without_router(config)
      out, _ = small.forward(dataclasses.replace(config, dtype="bfloat16"))
    expected, _ = small.forward(config)
    gap = float(jnp.abs(out - expected).max())
    self.assertBetween(gap, 1e-5, 0.05 * float(jnp.abs(expected).max()))

  def test_inputs_of_another_shape_raise(self, family):
    config = _CASES[family][0]
    x, *others = small.inputs(config)
    wrong, words = [x[0], x[:, :3]], r"must be \[batch, \d+, \d+, \d\]"
    if family == "llm":
      wrong, words = [jnp.zeros((1, 33), int)], r"33 tokens .*max_length=32"
    for array in wrong:
      with self.assertRaisesRegex(ValueError, words):
        jax.eval_shape(
          small.network(config).init, jax.random.key(0), array, *others
        )


def _vit(**changes) -> ViTConfig:
  return dataclasses.replace(small.VIT, **changes)


class ViTTest(parameterized.TestCase):
  @parameterized.parameters(
    {"image_size": (33, 47), "fixed_pool_size": 3},
    {"image_size": (24, 16), "window": 5, "pretrain_image_size": 16},
  )
  @pytest.mark.integration
  def test_other_sizes_have_finite_logits(self, **changes):
    logits, aux = small.forward(_vit(**changes))
    chex.assert_shape(logits, (small.B, 5))
    chex.assert_tree_all_finite((logits, aux))
    if "window" not in changes:
      chex.assert_trees_all_equal_shapes(
        small.random_variables(_vit(**changes)),
        small.random_variables(small.VIT),
      )

  def test_drop_path_rates_rise_linearly_over_all_blocks(self):
    first, second = drop_path_rates(_vit(drop_path=0.4))
    np.testing.assert_allclose(first, [0.0, 0.2], atol=1e-7)
    np.testing.assert_allclose(second, [0.4], atol=1e-7)

  @pytest.mark.integration
  def test_training_drops_and_evaluation_does_not(self):
    config = _vit(drop_path=0.9)
    variables, (images,) = small.random_variables(config), small.inputs(config)

    @functools.partial(jax.jit, static_argnames="train")
    def logits(key, train):
      rngs = {"dropout": key}
      return ViT(config).apply(variables, images, train=train, rngs=rngs)[0]

    keys = [jax.random.key(seed) for seed in range(4)]
    trained = [np.asarray(logits(key, train=True)) for key in keys]
    self.assertGreater(max(abs(x - trained[0]).max() for x in trained), 1e-3)
    evaluated, _ = small.forward(small.VIT)
    np.testing.assert_allclose(
      logits(keys[0], train=False), evaluated, rtol=1e-5, atol=1e-5
    )


class DiTTest(parameterized.TestCase):
  def test_timesteps_may_be_fractions(self):
    x, t, labels = small.inputs(small.DIT)
    plain, same, between = (
      small.forward(small.DIT, x, time, labels)[0]
      for time in (t, t + 0.0, t + 0.5)
    )
    np.testing.assert_allclose(same, plain, rtol=1e-3, atol=1e-4)
    self.assertGreater(float(jnp.abs(between - plain).max()), 1e-3)


class DiTInitializationTest(parameterized.TestCase):
  def test_matrices_are_xavier_embeddings_normal_and_all_else_zero(self):
    config = DiTConfig(
      channels=4, input_size=(4, 4), width=64, num_classes=200,
      num_heads=(4, 4), shared_heads=(1, 1), top_k=(1, 1),
      head_dim=32,  # 4 x 32 is twice the width
    )  # fmt: skip
    init = jax.jit(DiT(config).init_with_output)
    (out, _), variables = init(jax.random.key(0), *small.inputs(config))
    leaves = flatten_dict(nn.unbox(variables)["params"], sep="/")
    xavier = {
      "blocks0/attn/qkv/kernel": (64, 3 * 128),
      "blocks0/attn/out/kernel": (128, 64),
      "blocks0/attn/router/routed": (64, 3),
      "blocks0/mlp/up/kernel": (64, 256),
      "blocks0/mlp/down/kernel": (256, 64),
      "patch/kernel": (2 * 2 * 4, 64),
    }
    for path, fans in xavier.items():
      kernel = np.asarray(leaves[path])
      variance = 2 / sum(fans)
      spread = 3 / np.sqrt(kernel.size)  # of an estimate from so few values
      np.testing.assert_allclose(kernel.var(), variance, rtol=0.02 + spread)
      bound = np.sqrt(3 * variance)
      self.assertBetween(np.abs(kernel).max(), 0.95 * bound, 1.0001 * bound)
      if path.startswith("blocks0"):  # its layers start unalike
        self.assertGreater(np.abs(kernel[0] - kernel[1]).mean(), bound / 2)
    for path in ("time_in/kernel", "time_out/kernel", "label/embedding"):
      leaf = leaves[f"embed/{path}"]
      self.assertBetween(leaf.std(), 0.019, 0.021)
      self.assertGreater(np.abs(leaf).max(), 0.05)
    zeros = [p for p in leaves if "bias" in p or "modulation" in p]
    for path in (*zeros, "final/kernel"):
      np.testing.assert_array_equal(leaves[path], 0.0, path)
    chex.assert_shape(out, (small.B, 4, 4, 8))
    np.testing.assert_array_equal(out, 0.0)
