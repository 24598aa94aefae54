"""The table of the LLaMA family: exact both ways, names and layout."""

import dataclasses
import functools
import gzip
import json
import pathlib

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import (
  RotaryConfig,
  RouterConfig,
  released_model,
  without_router,
)
from moh_jax.convert import rules
from moh_jax.convert.llama import is_ignored, model_rules
from moh_jax.ops.position import rotate, rotation
from tests.convert import tiny_llm

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CONFIGS = {
  "moh": tiny_llm.MOH,
  "query_norm": tiny_llm.QUERY_NORM,
  "mha": tiny_llm.MHA,
  "one_kv_head_each": dataclasses.replace(tiny_llm.MOH, num_kv_heads=6),
  "one_stage": dataclasses.replace(
    tiny_llm.MOH, router=RouterConfig(two_stage=False)
  ),
  "biases": dataclasses.replace(
    tiny_llm.MHA, qkv_bias=True, out_bias=True, mlp_bias=True
  ),
  "tied": dataclasses.replace(tiny_llm.MHA, tie_embeddings=True),
  "heads_by_layer": without_router(tiny_llm.MOH, num_heads=(3, 6, 3)),
}


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(*_CONFIGS)
  def test_load_undoes_dump(self, name):
    model = _CONFIGS[name]
    loaded = rules.load_params(
      model_rules(model),
      tiny_llm.tensors(model),
      tiny_llm.abstract(model),
      source="some.file",
    )
    chex.assert_trees_all_equal(loaded, tiny_llm.random_params(model))


class NamesTest(absltest.TestCase):
  def test_routers_have_our_names_and_the_matrices_of_their_split(self):
    tensors = tiny_llm.tensors(tiny_llm.MOH)
    routers = {n: x.shape for n, x in tensors.items() if ".router." in n}
    expected = {}
    for layer, (shared, routed) in enumerate([(2, 4), (2, 4), (3, 3)]):
      place = f"model.layers.{layer}.self_attn.router."
      sizes = {"routed": routed, "shared": shared, "group": 2}
      expected |= {f"{place}{n}.weight": (s, 24) for n, s in sizes.items()}
    self.assertEqual(routers, expected)

  def test_query_norm_has_the_names_of_plain_llama(self):
    plain = tiny_llm.tensors(tiny_llm.MHA)
    self.assertCountEqual(tiny_llm.tensors(tiny_llm.QUERY_NORM), plain)

  def test_biases_have_transformers_names(self):
    names = {
      name.removeprefix("model.layers.1.")
      for name in tiny_llm.tensors(_CONFIGS["biases"])
      if name.startswith("model.layers.1.") and name.endswith("bias")
    }
    attention = [f"self_attn.{p}_proj.bias" for p in "qkvo"]
    mlp = [f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")]
    self.assertCountEqual(names, attention + mlp)

  def test_tied_model_has_no_output_layer_and_ignores_a_stored_one(self):
    self.assertNotIn("lm_head.weight", tiny_llm.tensors(_CONFIGS["tied"]))
    self.assertTrue(is_ignored(_CONFIGS["tied"], "lm_head.weight"))
    self.assertFalse(is_ignored(tiny_llm.MHA, "lm_head.weight"))

  def test_stored_rope_frequencies_are_ignored(self):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    self.assertTrue(is_ignored(tiny_llm.MHA, name))


class LayoutTest(parameterized.TestCase):
  """Against what transformers computes from the tensors."""

  def test_projections_follow_their_linears(self):
    model = _CONFIGS["biases"]
    tensors = tiny_llm.tensors(model)
    params = tiny_llm.random_params(model)["blocks0"]["attn"]
    x = np.random.default_rng(1).normal(size=24).astype(np.float32)
    for name, kernel, part, heads in (
      ("q", "q", 0, 6),
      ("k", "kv", 0, 3),
      ("v", "kv", 1, 3),
    ):
      place = f"model.layers.1.self_attn.{name}_proj"
      theirs = tensors[f"{place}.weight"] @ x + tensors[f"{place}.bias"]
      ours = np.einsum("c,chd->hd", x, params[kernel]["kernel"][1][:, part])
      ours = ours + params[kernel]["bias"][1][part]
      np.testing.assert_allclose(
        ours, theirs.reshape(heads, 4), rtol=1e-4, atol=1e-5
      )

  def test_output_projection_reads_heads_in_order(self):
    name = "model.layers.2.self_attn.o_proj.weight"
    weight = tiny_llm.tensors(tiny_llm.MHA)[name]
    kernel = tiny_llm.random_params(tiny_llm.MHA)["blocks0"]["attn"]["out"]
    chex.assert_shape(weight, (24, 24))
    np.testing.assert_array_equal(weight[:, 8:12].T, kernel["kernel"][2][2])

  def test_rope_turns_their_pairs(self):
    # transformers: x * cos + rotate_half(x) * sin.
    x = np.random.default_rng(2).normal(size=(1, 3, 2, 4)).astype(np.float32)
    by = rotation(jnp.arange(3)[None], RotaryConfig(), 4)
    cos, sin = (np.tile(t, 2)[:, :, None] for t in (by.cos, by.sin))
    half = np.concatenate([-x[..., 2:], x[..., :2]], axis=-1)
    np.testing.assert_allclose(
      rotate(jnp.asarray(x), by), x * cos + half * sin, rtol=1e-5, atol=1e-6
    )

  @parameterized.parameters(
    (0, "blocks0", 0), (1, "blocks0", 1), (2, "blocks1", 0)
  )
  def test_layer_is_in_the_run_that_holds_it(self, layer, run, place):
    kernel = tiny_llm.random_params(tiny_llm.MOH)[run]["mlp"]["down"]["kernel"]
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    np.testing.assert_array_equal(
      tiny_llm.tensors(tiny_llm.MOH)[name], kernel[place].T
    )


@functools.cache
def _tables() -> dict:
  with gzip.open(_GOLDENS / "param_tables_llm.json.gz") as stream:
    return json.load(stream)


class ReleasedTest(parameterized.TestCase):
  """Full sizes by their shapes."""

  @parameterized.parameters(
    ("moh-llama3-8b", "MoH-LLaMA3-8B"), ("llama3-8b", "LLaMA3-8B")
  )
  def test_has_the_public_names_shapes_and_total(self, name, public):
    model = released_model(name)
    tensors = rules.expected_tensors(
      model_rules(model), tiny_llm.abstract(model)
    )
    shapes = {key: list(leaf.shape) for key, leaf in tensors.items()}
    self.assertEqual(shapes, _tables()[public]["params"])
    total = sum(leaf.size for leaf in tensors.values())
    self.assertEqual(total, _tables()[public]["total"])
    chex.assert_type(list(tensors.values()), jnp.float32)


class JoinedTest(parameterized.TestCase):
  @parameterized.product(axis=(0, 1, 2), first=(0, 1))
  def test_parts_are_those_of_the_whole(self, axis, first):
    arrays = [np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 10]
    whole = np.stack(arrays, axis)
    joined = rules._Joined(arrays, axis)
    self.assertEqual(joined.shape, whole.shape)
    index = (slice(first, 2), slice(0, 2), slice(0, 1))
    np.testing.assert_array_equal(joined[index], whole[index])
    np.testing.assert_array_equal(joined[index[:1]], whole[index[:1]])
    np.testing.assert_array_equal(np.asarray(joined, np.float32), whole)


if __name__ == "__main__":
  absltest.main()
