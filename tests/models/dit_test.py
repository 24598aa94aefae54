"""The diffusion transformer: its inputs, initialization and stacks."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiTConfig, without_router
from moh_jax.convert import rules
from moh_jax.convert.dit import model_rules
from moh_jax.models.dit import DiT, patchify, unpatchify
from tests.models import small

_CONFIG = small.DIT
_MHA = without_router(
  _CONFIG, num_heads=(4,) * 3, shared_heads=(4,) * 3, top_k=(0,) * 3
)
_forward = functools.partial(small.forward, _CONFIG)


class DiTTest(parameterized.TestCase):
  @parameterized.parameters("x", "t", "labels")
  def test_output_depends_on(self, name):
    inputs = dict(zip(("x", "t", "labels"), small.inputs(_CONFIG)))
    moved = inputs | {name: inputs[name] - 1}
    plain, _ = _forward(*inputs.values())
    out, _ = _forward(*moved.values())
    self.assertTrue(np.all(np.abs(out - plain).max((1, 2, 3)) > 1e-3))

  def test_timesteps_may_be_fractions(self):
    x, t, labels = small.inputs(_CONFIG)
    plain, _ = _forward(x, t, labels)
    same, between = (_forward(x, t + y, labels)[0] for y in (0.0, 0.5))
    np.testing.assert_allclose(same, plain, rtol=1e-3, atol=1e-4)
    self.assertGreater(float(jnp.abs(between - plain).max()), 1e-3)

  @parameterized.parameters(((1, 6), 1, True), ((9, 3), 3, False))
  def test_sides_may_be_any_multiples_of_the_patch(self, size, patch, learns):
    config = dataclasses.replace(
      _CONFIG, input_size=size, patch_size=patch, learn_sigma=learns
    )
    out, _ = jax.eval_shape(
      DiT(config).apply, small.random_variables(config), *small.inputs(config)
    )
    chex.assert_shape(out, (small.B, *size, 6 if learns else 3))

  @parameterized.parameters(1, 2)
  def test_rows_and_columns_of_patches_have_places(self, axis):
    # Without position codes the output would move along with the input.
    x, t, labels = small.inputs(_CONFIG)
    plain, _ = _forward(x, t, labels)
    moved, _ = _forward(jnp.roll(x, 2, axis), t, labels)
    back = jnp.roll(moved, -2, axis)
    self.assertGreater(float(jnp.abs(back - plain).max()), 1e-2)


class RunsTest(absltest.TestCase):
  def test_how_layers_are_grouped_does_not_matter(self):
    # Without a router the split is not read, but it still divides the runs.
    parts = dataclasses.replace(_MHA, shared_heads=(4, 3, 4), top_k=(0, 1, 0))
    self.assertEqual([len(c.layer_groups()) for c in (_MHA, parts)], [1, 3])
    variables = small.random_variables(_MHA)
    public = rules.dump_params(model_rules(_MHA), variables["params"])
    params = rules.load_params(
      model_rules(parts),
      public,
      small.random_variables(parts)["params"],
      source="whole",
    )
    self.assertCountEqual(
      [name for name in params if name.startswith("blocks")],
      ["blocks0", "blocks1", "blocks2"],
    )
    out, _ = small.forward(parts, variables={"params": params})
    expected, _ = small.forward(_MHA)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


class InitializationTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = DiTConfig(
      channels=4,
      input_size=(4, 4),
      width=64,
      num_heads=(4, 4),
      head_dim=32,  # 4 x 32 is twice the width
      shared_heads=(1, 1),
      top_k=(1, 1),
      num_classes=200,
    )
    init = jax.jit(DiT(cls.config).init_with_output)
    (cls.out, _), variables = init(jax.random.key(0), *small.inputs(cls.config))
    cls.variables = nn.unbox(variables)

  def _leaf(self, path: str) -> np.ndarray:
    leaf = self.variables["params"]
    for name in path.split("/"):
      leaf = leaf[name]
    return np.asarray(leaf)

  @parameterized.parameters(
    ("blocks0/attn/qkv/kernel", 64, 3 * 128),
    ("blocks0/attn/out/kernel", 128, 64),
    ("blocks0/attn/router/routed", 64, 3),
    ("blocks0/mlp/up/kernel", 64, 256),
    ("blocks0/mlp/down/kernel", 256, 64),
    ("patch/kernel", 2 * 2 * 4, 64),
  )
  def test_matrix_is_uniform_with_xavier_variance(self, path, fan_in, fan_out):
    kernel = self._leaf(path)
    variance = 2 / (fan_in + fan_out)
    spread = 3 / np.sqrt(kernel.size)  # of an estimate from so few values
    np.testing.assert_allclose(kernel.var(), variance, rtol=0.02 + spread)
    bound = np.sqrt(3 * variance)
    self.assertBetween(np.abs(kernel).max(), 0.95 * bound, 1.0001 * bound)
    if path.startswith("blocks0"):  # its layers start unalike
      first, second = kernel
      alike = np.corrcoef(first.ravel(), second.ravel())[0, 1]
      self.assertLess(abs(alike), 0.3)

  def test_embeddings_are_normal_and_the_rest_is_zero(self):
    for path in ("time_in/kernel", "time_out/kernel", "label/embedding"):
      leaf = self._leaf(f"embed/{path}")
      self.assertBetween(leaf.std(), 0.019, 0.021)
      self.assertGreater(np.abs(leaf).max(), 0.05)
    for path in (
      "blocks0/modulation/linear/kernel",
      "final_modulation/linear/kernel",
      "final/kernel",
      "final/bias",
      "blocks0/attn/qkv/bias",
      "blocks0/mlp/up/bias",
      "patch/bias",
    ):
      np.testing.assert_array_equal(self._leaf(path), 0.0)
    chex.assert_shape(self.out, (small.B, 4, 4, 8))
    np.testing.assert_array_equal(self.out, 0.0)

  @parameterized.parameters((0.1, 6), (0.0, 5))
  def test_label_dropout_adds_a_row_for_no_label(self, rate, rows):
    params = small.random_variables(
      dataclasses.replace(_CONFIG, label_dropout=rate)
    )["params"]
    chex.assert_shape(params["embed"]["label"]["embedding"], (rows, 8))


class PatchTest(absltest.TestCase):
  def test_tokens_go_row_by_row_and_within_rows_columns_channels(self):
    size, patch, channels = (4, 6), 2, 3
    x = np.arange(4 * 6 * 3.0).reshape(1, *size, channels)
    tokens = np.asarray(patchify(jnp.asarray(x), patch))
    for row, column in np.ndindex(2, 3):
      rows = slice(row * patch, (row + 1) * patch)
      columns = slice(column * patch, (column + 1) * patch)
      expected = x[0, rows, columns].ravel()
      np.testing.assert_array_equal(tokens[0, row * 3 + column], expected)
    back = unpatchify(jnp.asarray(tokens), (2, 3), patch)
    np.testing.assert_array_equal(back, x)
