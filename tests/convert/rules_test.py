"""Conversion tables: inverses of each other, and errors that list it all."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import without_router
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules, vit
from moh_jax.models.vit import ViT
from moh_jax.runtime.params import abstract_params, unbox
from tests.models import small_vit

_MOH = small_vit.TWO_STAGES
_CONFIGS = {
  "moh": _MOH,
  "transnext": without_router(_MOH),
  "no_qkv_bias": dataclasses.replace(_MOH, qkv_bias=False),
  "one_stage_router": dataclasses.replace(
    _MOH, router=RouterConfig(two_stage=False)
  ),
}


@functools.cache
def _abstract(name: str):
  config = _CONFIGS[name]
  images = jax.ShapeDtypeStruct((1, *config.image_size, 3), jnp.float32)
  return unbox(abstract_params(ViT(config), (images,)))


def _random_params(name: str):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), _abstract(name)
  )


def _load(name: str, tensors):
  table = vit.model_rules(_CONFIGS[name])
  return rules.load_params(table, tensors, _abstract(name), source="some.file")


def _dump(name: str):
  return rules.dump_params(
    vit.model_rules(_CONFIGS[name]), _random_params(name)
  )


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(*_CONFIGS)
  def test_load_undoes_dump(self, name):
    chex.assert_trees_all_equal(_load(name, _dump(name)), _random_params(name))

  @parameterized.parameters(*_CONFIGS)
  def test_dump_undoes_load(self, name):
    tensors = _dump(name)
    table = vit.model_rules(_CONFIGS[name])
    again = rules.dump_params(table, _load(name, tensors))
    chex.assert_trees_all_equal(again, tensors)

  def test_layers_of_a_stage_get_their_own_tensors(self):
    tensors = _dump("moh")
    kernel = _random_params("moh")["stage1"]["blocks"]["attn"]["q"]["kernel"]
    for layer in range(2):
      np.testing.assert_array_equal(
        tensors[f"block1.{layer}.attn.q.weight"], kernel[layer].reshape(8, 8).T
      )

  def test_gate_rows_come_before_value_rows(self):
    tensors, mlp = (
      _dump("moh"),
      _random_params("moh")["stage2"]["blocks"]["mlp"],
    )
    expected = np.concatenate(
      [mlp["gate"]["kernel"][0].T, mlp["value"]["kernel"][0].T]
    )
    np.testing.assert_array_equal(tensors["block2.0.mlp.fc1.weight"], expected)

  def test_loads_into_our_dtypes(self):
    tensors = {k: v.astype(np.float16) for k, v in _dump("moh").items()}
    chex.assert_type(jax.tree.leaves(_load("moh", tensors)), np.float32)

  @parameterized.parameters(
    ((2, 2), ["wg", "wg_0", "wg_1"]),
    ((1, 3), ["wg", "wg_0"]),
    ((0, 2), ["wg"]),
    ((6, 0), ["wg_1"]),
    ((1, 0), []),
  )
  def test_router_has_the_matrices_its_split_needs(self, split, expected):
    table = rules.router_rules(HeadBudget(6, *split, 4), RouterConfig())
    names = [name for rule in table for name in rule.theirs]
    self.assertCountEqual(names, [f"{name}.weight" for name in expected])

  def test_no_router_has_no_matrices(self):
    budget = HeadBudget(6, 2, 2, 4)
    self.assertEmpty(rules.router_rules(budget, RouterConfig(kind="none")))


class PrimitiveRulesTest(absltest.TestCase):
  """Each layer's layout, against what the two frameworks compute."""

  def _loaded(self, table, tensors):
    out = {}
    for rule in table:
      arrays = rule.load([tensors[name] for name in rule.theirs])
      out |= zip(("/".join(path) for path in rule.ours), arrays)
    return out

  def test_linear(self):
    weight = np.arange(6.0).reshape(2, 3)  # out, in
    tensors = {"fc.weight": weight, "fc.bias": np.ones(2)}
    params = self._loaded(rules.linear("fc", "a/b"), tensors)
    x = np.array([1.0, 2.0, 3.0])
    out = x @ params["a/b/kernel"] + params["a/b/bias"]
    np.testing.assert_array_equal(out, weight @ x + 1)

  def test_conv(self):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 3, 3, 5)).astype(np.float32)  # out, in, X, Y
    tensors = {"c.weight": weight, "c.bias": np.zeros(4, np.float32)}
    params = self._loaded(rules.conv("c", "c"), tensors)
    image = rng.normal(size=(1, 3, 3, 5)).astype(np.float32)
    out = nn.Conv(4, (3, 5), padding="VALID").apply(
      {"params": {"kernel": params["c/kernel"], "bias": params["c/bias"]}},
      image.transpose(0, 2, 3, 1),
    )
    expected = np.einsum("oixy,bixy->bo", weight, image)
    np.testing.assert_allclose(out[:, 0, 0], expected, rtol=1e-4, atol=1e-5)

  def test_norm(self):
    tensors = {"n.weight": np.ones(3), "n.bias": np.zeros(3)}
    params = self._loaded(rules.norm("n", "n"), tensors)
    self.assertCountEqual(params, ["n/scale", "n/bias"])
    np.testing.assert_array_equal(params["n/scale"], 1.0)

  def test_stacked_adds_a_layer_axis_and_takes_it_away(self):
    block = [rules.one("w", "w", rules.TRANSPOSED)]
    (rule,) = rules.stacked(block, "{layer}.", ("top",), range(2))
    arrays = [np.arange(6.0).reshape(2, 3), np.ones((2, 3))]
    (loaded,) = rule.load(arrays)
    chex.assert_shape(loaded, (2, 3, 2))
    self.assertEqual(rule.theirs, ("0.w", "1.w"))
    self.assertEqual(rule.ours, (("top", "w"),))
    chex.assert_trees_all_equal(rule.dump([loaded]), arrays)

  def test_prefixed_moves_both_sides(self):
    (rule,) = rules.prefixed([rules.one("w", "a/w")], "x.", ("top",))
    self.assertEqual(rule.theirs, ("x.w",))
    self.assertEqual(rule.ours, (("top", "a", "w"),))


class ErrorsTest(absltest.TestCase):
  def _message(self, tensors) -> str:
    with self.assertRaises(ValueError) as caught:
      _load("moh", tensors)
    return str(caught.exception)

  def test_missing_extra_and_misshapen_are_listed_at_once(self):
    tensors = _dump("moh")
    del tensors["head.bias"], tensors["norm2.weight"]
    tensors["decoder.weight"] = np.zeros(3, np.float32)
    tensors["norm1.bias"] = np.zeros(7, np.float32)
    message = self._message(tensors)
    self.assertIn("some.file", message)
    self.assertRegex(message, r"2 missing: .*head\.bias")
    self.assertIn("norm2.weight", message)
    self.assertRegex(message, r"1 not expected: decoder\.weight")
    self.assertRegex(message, r"1 shape: norm1\.bias \(7,\) instead of \(8,\)")

  def test_transposed_tensor_is_misshapen(self):
    tensors = _dump("moh")
    tensors["head.weight"] = tensors["head.weight"].T
    message = self._message(tensors)
    self.assertIn("head.weight (16, 5) instead of (5, 16)", message)

  def test_long_lists_are_cut_with_their_count(self):
    count = len(_dump("moh"))
    message = self._message({})
    self.assertIn(f"{count} missing", message)
    self.assertIn(f"and {count - 8} more", message)

  def test_dump_names_a_parameter_without_a_rule(self):
    params = _random_params("moh")
    params["decoder"] = {"kernel": np.zeros(3)}
    with self.assertRaisesRegex(ValueError, "decoder/kernel"):
      rules.dump_params(vit.model_rules(_MOH), params)


if __name__ == "__main__":
  absltest.main()
