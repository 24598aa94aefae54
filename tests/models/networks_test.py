"""What the networks of all families have in common.

Their numbers are held against the public releases in tests/parity.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import without_router
from moh_jax.evaluation.probe import recorded_layers
from tests.models import small

# Config, shape of the output, layers of each stack.
_CASES = {
  "vit": (small.VIT, (2, 5), {"stage1": 2, "stage2": 1}),
  "dit": (small.DIT, (2, 4, 6, 6), {"blocks0": 2, "blocks1": 1}),
  "llm": (small.UNEQUAL, (2, 8, 60), {"blocks0": 1, "blocks1": 1}),
}
_RECORDED = {
  "vit": {"stage1_out": (2, 16, 8), "stage2_out": (2, 4, 16)},
  "dit": {"tokens": (2, 6, 8), "conditioning": (2, 8)},
  "llm": {},
}


@parameterized.parameters(*_CASES)
class NetworksTest(parameterized.TestCase):
  def test_shapes_and_float32(self, family):
    config, shape, stacks = _CASES[family]
    (out, aux), grads = small.gradient(config)
    chex.assert_shape(out, shape)
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    self.assertCountEqual(aux.layers, stacks)
    for (name, depth), group in zip(stacks.items(), config.layer_groups()):
      heads = group.budget.num_heads
      chex.assert_shape(aux.layers[name].load, (depth, heads))
    chex.assert_type(jax.tree.leaves((out, aux, grads)), jnp.float32)

  def test_side_values_count_routed_layers_and_all_heads(self, family):
    config, _, stacks = _CASES[family]
    (_, aux), _ = small.gradient(config)
    losses = [
      aux.layers[name].balance_loss
      for name, group in zip(stacks, config.layer_groups())
      if group.budget.top_k
    ]
    expected = np.concatenate(losses).mean()
    np.testing.assert_allclose(aux.balance_loss, expected, rtol=1e-6)
    self.assertGreater(float(aux.balance_loss), 0.5)
    np.testing.assert_allclose(aux.activated_share, config.activated_share)

  def test_gradients_are_finite_and_reach_every_parameter(self, family):
    _, grads = small.gradient(_CASES[family][0])
    chex.assert_tree_all_finite(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      # A constant on all logits of a full attention changes nothing.
      if not ("stage2" in name and "cpb" in name and "bias" in name):
        self.assertGreater(float(jnp.abs(leaf).max()), 0.0, name)

  def test_remat_recomputes_every_stack_and_gives_equal_gradients(self, family):
    config, _, stacks = _CASES[family]
    again = dataclasses.replace(config, remat="dots")
    for model, count in ((config, 0), (again, len(stacks))):
      arguments = small.random_variables(model), *small.inputs(model)
      program = jax.make_jaxpr(small.network(model).apply)(*arguments)
      self.assertEqual(str(program).count("prevent_cse"), count)
    ours, plain = small.gradient(again), small.gradient(config)
    chex.assert_trees_all_close(ours, plain, rtol=1e-4, atol=1e-4)

  def test_bfloat16_is_close_and_parameters_stay_float32(self, family):
    config = _CASES[family][0]
    if family == "llm":  # or a rounding chooses another head
      config = without_router(config)
    half = dataclasses.replace(config, dtype="bfloat16")
    (out, aux), (expected, _) = small.forward(half), small.forward(config)
    leaves = jax.tree.leaves((small.random_variables(half), out, aux))
    chex.assert_type(leaves, jnp.float32)
    gap = float(jnp.abs(out - expected).max())
    self.assertBetween(gap, 1e-5, 0.05 * float(jnp.abs(expected).max()))

  def test_examples_do_not_see_each_other(self, family):
    config = _CASES[family][0]
    given = small.inputs(config)
    plain, _ = small.forward(config)
    other, _ = small.forward(config, *(x.at[1].set(x[0]) for x in given))
    np.testing.assert_allclose(other[0], plain[0], rtol=1e-5, atol=1e-5)
    self.assertGreater(float(jnp.abs(other[1] - plain[1]).max()), 1e-2)

  def test_records_routing_and_tokens(self, family):
    config = _CASES[family][0]
    _, recorded = small.record(config)
    budgets = config.layer_budgets().values()
    routings = recorded_layers(recorded, "routing", 3)
    for budget, routing in zip(budgets, routings, strict=True):
      gates = np.asarray(routing.gates) != 0
      np.testing.assert_array_equal(gates.sum(-1), budget.active)
      np.testing.assert_array_equal(
        gates[..., budget.shared :], routing.selected
      )
    for name, shape in _RECORDED[family].items():
      chex.assert_shape(recorded[name][0], shape)

  def test_router_off_has_no_router_and_all_heads(self, family):
    config = without_router(_CASES[family][0])
    paths = jax.tree_util.tree_leaves_with_path(small.random_variables(config))
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    self.assertNotIn("router", "".join(names))
    out, aux = small.forward(config)
    chex.assert_tree_all_finite(out)
    self.assertEqual(float(aux.activated_share), 1.0)
    self.assertEqual(float(aux.balance_loss), 0.0)

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
