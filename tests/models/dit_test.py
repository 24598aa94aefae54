"""The diffusion transformer: shapes, initialization, runs, remat, precision.

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

from moh_jax.config import DiTConfig, without_router
from moh_jax.convert import rules
from moh_jax.convert.dit import model_rules
from moh_jax.models.dit import DiT, patchify, unpatchify

# Two equal layers of 2 + 1 active heads of 4, and one of 6 that are all on.
_CONFIG = DiTConfig(
  input_size=(4, 6),
  channels=3,
  num_classes=5,
  width=8,
  num_heads=(4, 4, 6),
  head_dim=4,
  shared_heads=(2, 2, 6),
  top_k=(1, 1, 0),
  mlp_ratio=2.0,
)
_MHA = without_router(
  _CONFIG, num_heads=(4,) * 3, shared_heads=(4,) * 3, top_k=(0,) * 3
)
_B = 2


def _config(**changes) -> DiTConfig:
  return dataclasses.replace(_CONFIG, **changes)


def _inputs(config: DiTConfig = _CONFIG):
  x = np.random.default_rng(0).normal(size=(_B, *config.input_shape))
  return jnp.asarray(x, jnp.float32), jnp.array([7, 900]), jnp.array([4, 1])


def _init(config: DiTConfig):
  return nn.unbox(DiT(config).init(jax.random.key(0), *_inputs(config)))


@functools.cache
def _variables(config: DiTConfig):
  """Random parameters, larger than the initial ones."""
  shapes = jax.eval_shape(functools.partial(_init, config))["params"]
  rng = np.random.default_rng(1)
  return {
    "params": jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype), shapes
    )
  }


@functools.cache
def _run(config: DiTConfig):
  """Output, side values and gradients, compiled once per config."""

  def loss(variables):
    out, aux = DiT(config).apply(variables, *_inputs(config))
    return jnp.sum(jnp.sin(out)) + aux.balance_loss, (out, aux)

  call = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, outputs), grads = call(_variables(config))
  return *outputs, grads


@functools.cache
def _recording(config: DiTConfig):
  """A function of the inputs alone: the results, and what is recorded."""
  apply = functools.partial(DiT(config).apply, mutable=["intermediates"])
  return jax.jit(functools.partial(apply, _variables(config)))


def _forward(config: DiTConfig):
  return lambda *inputs: _recording(config)(*inputs)[0]


class DiTTest(parameterized.TestCase):
  def test_shapes_and_float32(self):
    out, aux, grads = _run(_CONFIG)
    chex.assert_shape(out, (_B, 4, 6, 6))
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_shape(aux.layers["blocks0"].load, (2, 4))
    chex.assert_shape(aux.layers["blocks1"].load, (1, 6))
    chex.assert_type(jax.tree.leaves((out, aux, grads)), jnp.float32)

  def test_side_values_count_routed_layers_and_all_heads(self):
    _, aux, _ = _run(_CONFIG)
    np.testing.assert_allclose(
      aux.balance_loss, aux.layers["blocks0"].balance_loss.mean(), rtol=1e-6
    )
    self.assertGreater(float(aux.balance_loss), 0.5)
    np.testing.assert_allclose(aux.activated_share, (3 + 3 + 6) / (4 + 4 + 6))

  def test_gradients_are_finite_and_reach_every_parameter(self):
    _, _, grads = _run(_CONFIG)
    chex.assert_tree_all_finite(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0, name)

  def test_remat_gives_equal_outputs_and_gradients(self):
    ours, plain = _run(_config(remat="dots")), _run(_CONFIG)
    chex.assert_trees_all_close(ours, plain, rtol=1e-4, atol=1e-4)

  @parameterized.parameters(("none", 0), ("full", 2), ("dots", 2))
  def test_remat_recomputes_every_run(self, remat, count):
    config = _config(remat=remat)

    def loss(variables):
      return DiT(config).apply(variables, *_inputs(config))[0].sum()

    program = str(jax.make_jaxpr(loss)(_variables(_CONFIG)))
    self.assertEqual(program.count("prevent_cse"), count)

  def test_bfloat16_is_close_and_parameters_stay_float32(self):
    config = _config(dtype="bfloat16")
    out, aux = _forward(config)(*_inputs())
    expected, _ = _forward(_CONFIG)(*_inputs())
    leaves = jax.tree.leaves((_variables(config), out, aux))
    chex.assert_type(leaves, jnp.float32)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(out, expected, atol=0.05 * scale)
    self.assertGreater(float(jnp.abs(out - expected).max()), 0.0)

  def test_examples_do_not_see_each_other(self):
    x, t, labels = _inputs()
    plain, _ = _forward(_CONFIG)(x, t, labels)
    other, _ = _forward(_CONFIG)(
      x.at[1].add(1.0), t.at[1].set(3), labels.at[1].set(0)
    )
    np.testing.assert_allclose(other[0], plain[0], rtol=1e-5, atol=1e-6)
    self.assertGreater(float(jnp.abs(other[1] - plain[1]).max()), 1e-2)

  @parameterized.parameters("x", "t", "labels")
  def test_output_depends_on(self, name):
    inputs = dict(zip(("x", "t", "labels"), _inputs()))
    moved = inputs | {name: inputs[name] - 1}
    plain, _ = _forward(_CONFIG)(*inputs.values())
    out, _ = _forward(_CONFIG)(*moved.values())
    self.assertTrue(np.all(np.abs(out - plain).max((1, 2, 3)) > 1e-3))

  def test_timesteps_may_be_fractions(self):
    x, t, labels = _inputs()
    plain, _ = _forward(_CONFIG)(x, t, labels)
    same, between = (_forward(_CONFIG)(x, t + y, labels)[0] for y in (0.0, 0.5))
    np.testing.assert_allclose(same, plain, rtol=1e-3, atol=1e-4)
    self.assertGreater(float(jnp.abs(between - plain).max()), 1e-3)

  @parameterized.parameters(((2, 6, 4, 3),), ((4, 6, 3),))
  def test_inputs_of_another_shape_raise(self, shape):
    _, t, labels = _inputs()
    with self.assertRaisesRegex(ValueError, r"must be \[batch, 4, 6, 3\]"):
      DiT(_CONFIG).init(jax.random.key(0), jnp.zeros(shape), t, labels)

  @parameterized.parameters(((1, 6), 1, True), ((9, 3), 3, False))
  def test_sides_may_be_any_multiples_of_the_patch(self, size, patch, learns):
    config = _config(input_size=size, patch_size=patch, learn_sigma=learns)
    out, _ = jax.eval_shape(
      DiT(config).apply, _variables(config), *_inputs(config)
    )
    chex.assert_shape(out, (_B, *size, 6 if learns else 3))

  @parameterized.parameters(1, 2)
  def test_rows_and_columns_of_patches_have_places(self, axis):
    # Without position codes the output would move along with the input.
    x, t, labels = _inputs()
    plain, _ = _forward(_CONFIG)(x, t, labels)
    moved, _ = _forward(_CONFIG)(jnp.roll(x, 2, axis), t, labels)
    back = jnp.roll(moved, -2, axis)
    self.assertGreater(float(jnp.abs(back - plain).max()), 1e-2)


class RoutingTest(absltest.TestCase):
  def test_records_gates_tokens_conditioning_and_layers(self):
    _, recorded = _recording(_CONFIG)(*_inputs())
    recorded = recorded["intermediates"]
    (routing,) = recorded["blocks0"]["attn"]["router"]["routing"]
    gates = np.asarray(routing.gates)
    chex.assert_shape(gates, (2, _B, 6, 4))
    np.testing.assert_array_equal((gates != 0).sum(-1), 3)
    np.testing.assert_array_equal(gates[..., 2:] != 0, routing.selected)
    (routing,) = recorded["blocks1"]["attn"]["router"]["routing"]
    self.assertTrue(np.all(np.asarray(routing.gates) > 0))
    chex.assert_shape(recorded["tokens"][0], (_B, 6, 8))
    chex.assert_shape(recorded["conditioning"][0], (_B, 8))
    chex.assert_shape(recorded["blocks0"]["out"][0], (2, _B, 6, 8))
    chex.assert_shape(recorded["blocks1"]["out"][0], (1, _B, 6, 8))

  def test_router_off_has_no_router_and_all_heads(self):
    self.assertNotIn("router", _variables(_MHA)["params"]["blocks0"]["attn"])
    _, aux = _forward(_MHA)(*_inputs())
    self.assertEqual(float(aux.activated_share), 1.0)
    self.assertEqual(float(aux.balance_loss), 0.0)


class RunsTest(absltest.TestCase):
  def test_how_layers_are_grouped_does_not_matter(self):
    # Without a router the split is not read, but it still divides the runs.
    parts = dataclasses.replace(_MHA, shared_heads=(4, 3, 4), top_k=(0, 1, 0))
    self.assertEqual([len(c.layer_groups()) for c in (_MHA, parts)], [1, 3])
    variables = _variables(_MHA)
    public = rules.dump_params(model_rules(_MHA), variables["params"])
    params = rules.load_params(
      model_rules(parts), public, _variables(parts)["params"], source="whole"
    )
    self.assertCountEqual(
      [name for name in params if name.startswith("blocks")],
      ["blocks0", "blocks1", "blocks2"],
    )
    out, _ = jax.jit(DiT(parts).apply)({"params": params}, *_inputs())
    expected, _ = _forward(_MHA)(*_inputs())
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
    (cls.out, _), variables = init(jax.random.key(0), *_inputs(cls.config))
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
    chex.assert_shape(self.out, (_B, 4, 4, 8))
    np.testing.assert_array_equal(self.out, 0.0)

  @parameterized.parameters((0.1, 6), (0.0, 5))
  def test_label_dropout_adds_a_row_for_no_label(self, rate, rows):
    params = _variables(_config(label_dropout=rate))["params"]
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
