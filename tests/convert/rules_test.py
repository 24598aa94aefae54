"""Conversion tables: exact both ways, names, layouts, and errors.

Released models are compared with recorded tables of their names and shapes in
tests/models/registry_test.py.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import Config, RouterConfig, SampleConfig, without_router
from moh_jax.convert import rules
from moh_jax.convert.checkpoints import model_rules
from moh_jax.data.infer import resolve
from moh_jax.ops.position import sincos_2d
from tests.convert import tiny_llm
from tests.models import small
from tests.training import tiny

_VIT, _LLM = small.TWO_STAGES, tiny_llm.MOH
_DIT = dataclasses.replace(
  tiny.DIT,
  **{"input_size": (4, 6), "channels": 3, "patch_size": 2, "width": 8},
  **{"num_heads": (4, 4, 6, 4), "shared_heads": (2, 2, 6, 1)},
  top_k=(1, 1, 0, 2),
)
_ONE_STAGE = {"router": RouterConfig(two_stage=False)}
_MODELS = {
  "vit": _VIT,
  "vit_transnext": without_router(_VIT),
  "vit_scaled": dataclasses.replace(_VIT, attention_out_multiplier=0.5),
  "vit_one_stage": dataclasses.replace(_VIT, qkv_bias=False, **_ONE_STAGE),
  "dit": _DIT,
  "dit_mha": without_router(_DIT),
  "dit_scaled": dataclasses.replace(_DIT, attention_out_multiplier=0.5),
  "dit_plain_output": dataclasses.replace(
    _DIT, learn_sigma=False, label_dropout=0.0, patch_size=1
  ),
  "llm": _LLM,
  "llm_scaled": dataclasses.replace(_LLM, attention_out_multiplier=0.5),
  "llm_query_norm": tiny_llm.QUERY_NORM,
  "llm_mha": tiny_llm.MHA,
  "llm_one_stage": dataclasses.replace(_LLM, num_kv_heads=6, **_ONE_STAGE),
  "llm_biases": dataclasses.replace(
    tiny_llm.MHA, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True
  ),
  "llm_tied": dataclasses.replace(tiny_llm.MHA, tie_embeddings=True),
  "llm_heads_by_layer": without_router(_LLM, num_heads=(3, 6, 3)),
}


def _run(model) -> Config:
  return resolve(rules.converter_of(model).released_run(model, {}))


@functools.cache
def _params(name: str):
  config = _run(_MODELS[name.partition("_")[0]])
  if config.model.family == "dit":  # also of models without a null label
    config = dataclasses.replace(config, sample=SampleConfig(cfg_scale=1.0))
  config = dataclasses.replace(config, model=_MODELS[name])
  return tiny.random_params(config)


def _dump(name: str):
  return rules.dump_params(model_rules(_MODELS[name]), _params(name))


def _load(name: str, tensors):
  abstract = jax.eval_shape(lambda: _params(name))
  table = model_rules(_MODELS[name])
  return rules.load_params(table, tensors, abstract, source="some.file")


class InverseTest(parameterized.TestCase):
  @parameterized.parameters(*_MODELS)
  def test_load_and_dump_undo_each_other(self, name):
    tensors = _dump(name)
    loaded = _load(name, tensors)
    chex.assert_trees_all_equal(loaded, _params(name))
    again = rules.dump_params(model_rules(_MODELS[name]), loaded)
    chex.assert_trees_all_equal(again, tensors)
    halves = {
      k: v if k == "pos_embed" else v.astype(np.float16)
      for k, v in tensors.items()
    }
    chex.assert_type(jax.tree.leaves(_load(name, halves)), np.float32)


class NamesTest(parameterized.TestCase):
  @parameterized.parameters("vit", "dit", "llm")
  def test_public_weights_include_the_constant_of_the_attention(self, family):
    plain, scaled = _dump(family), _dump(f"{family}_scaled")
    for name, tensor in plain.items():
      factor = 0.5 if ".attn.proj." in name or ".o_proj." in name else 1
      np.testing.assert_array_equal(scaled[name], tensor * factor)

  def test_routers_of_language_models_have_our_names(self):
    tensors = _dump("llm")
    found = {n: x.shape for n, x in tensors.items() if ".router." in n}
    expected = {
      f"model.layers.{layer}.self_attn.router.{name}.weight": (size, 24)
      for layer, sizes in enumerate([(4, 2), (4, 2), (3, 3)])
      for name, size in zip(("routed", "shared", "group"), (*sizes, 2))
    }
    self.assertEqual(found, expected)


class PositionTableTest(parameterized.TestCase):
  def test_is_written_and_other_libraries_rounding_accepted(self):
    tensors = _dump("dit")
    expected = sincos_2d((2, 3), 8)[None]
    np.testing.assert_array_equal(tensors["pos_embed"], expected)
    tensors["pos_embed"] = tensors["pos_embed"] + 5e-6
    chex.assert_trees_all_equal(_load("dit", tensors), _params("dit"))

  @parameterized.parameters(
    (lambda table: table + 1e-3 * (np.arange(8) == 3), "is not"),
    (lambda table: table[:, [0, 3, 1, 4, 2, 5]],  # a turned grid
     "is not the fixed .* table of a 2 x 3 grid"),
    (lambda table: sincos_2d((3, 3), 8)[None],
     r"\(1, 9, 8\) instead of \(1, 6, 8\)"),
  )  # fmt: skip
  def test_other_table_is_refused(self, change, message):
    tensors = _dump("dit")
    tensors["pos_embed"] = change(tensors["pos_embed"])
    with self.assertRaisesRegex(ValueError, f"pos_embed {message}"):
      _load("dit", tensors)


class ErrorsTest(absltest.TestCase):
  def test_missing_extra_and_misshapen_are_listed_at_once(self):
    tensors, count = _dump("vit"), len(_dump("vit"))
    with self.assertRaisesRegex(
      ValueError, f"{count} missing: .*, and {count - 8} more"
    ):
      _load("vit", {})
    del tensors["head.bias"], tensors["norm2.weight"]
    tensors["decoder.weight"] = np.zeros(3, np.float32)
    tensors["norm1.bias"] = np.zeros(7, np.float32)
    tensors["norm1.weight"] = np.zeros(8, np.int8)
    tensors["head.weight"] = tensors["head.weight"].T
    with self.assertRaises(ValueError) as caught:
      _load("vit", tensors)
    for part in (
      "some.file",
      r"2 missing: .*head\.bias",
      r"norm2\.weight",
      r"1 not expected: decoder\.weight",
      r"2 shape: .*norm1\.bias \(7,\) instead of \(8,\)",
      r"head\.weight \(16, 5\) instead of \(5, 16\)",
      "1 dtype, .* float32, .*: norm1.weight int8",
    ):
      self.assertRegex(str(caught.exception), part)

  def test_dump_names_a_parameter_without_a_rule(self):
    params = {**_params("vit"), "decoder": {"kernel": np.zeros(3)}}
    with self.assertRaisesRegex(ValueError, "decoder/kernel"):
      rules.dump_params(model_rules(_VIT), params)
