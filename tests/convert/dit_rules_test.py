"""The table of MoH-DiT and DiT: exact both ways, layers in their runs."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiTConfig, RouterConfig, without_router
from moh_jax.convert import rules
from moh_jax.convert.dit import model_rules
from moh_jax.models.dit import DiT, patchify
from moh_jax.ops.position import sincos_2d
from moh_jax.runtime.params import abstract_params, unbox

_MOH = DiTConfig(
  input_size=(4, 6),
  channels=3,
  num_classes=5,
  width=8,
  num_heads=(4, 4, 6, 4),
  head_dim=4,
  shared_heads=(2, 2, 6, 1),
  top_k=(1, 1, 0, 2),
)
_CONFIGS = {
  "moh": _MOH,
  "mha": without_router(_MOH),
  "one_stage_router": dataclasses.replace(
    _MOH, router=RouterConfig(two_stage=False)
  ),
  "plain_output": dataclasses.replace(
    _MOH, learn_sigma=False, label_dropout=0.0, patch_size=1
  ),
}


@functools.cache
def _abstract(name: str):
  config = _CONFIGS[name]
  x = jax.ShapeDtypeStruct((1, *config.input_shape), jnp.float32)
  number = jax.ShapeDtypeStruct((1,), jnp.int32)
  return unbox(abstract_params(DiT(config), (x, number, number)))


def _random_params(name: str):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), _abstract(name)
  )


def _load(name: str, tensors):
  table = model_rules(_CONFIGS[name])
  return rules.load_params(table, tensors, _abstract(name), source="some.file")


def _dump(name: str):
  return rules.dump_params(model_rules(_CONFIGS[name]), _random_params(name))


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(*_CONFIGS)
  def test_load_undoes_dump(self, name):
    chex.assert_trees_all_equal(_load(name, _dump(name)), _random_params(name))

  @parameterized.parameters(*_CONFIGS)
  def test_dump_undoes_load(self, name):
    tensors = _dump(name)
    table = model_rules(_CONFIGS[name])
    again = rules.dump_params(table, _load(name, tensors))
    chex.assert_trees_all_equal(again, tensors)


class LayoutTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, "blocks0", 0), (1, "blocks0", 1), (2, "blocks1", 0), (3, "blocks2", 0)
  )
  def test_layer_is_in_the_run_that_holds_it(self, layer, run, place):
    kernel = _random_params("moh")[run]["mlp"]["up"]["kernel"][place]
    tensor = _dump("moh")[f"blocks.{layer}.mlp.fc1.weight"]
    np.testing.assert_array_equal(tensor, kernel.T)

  def test_layers_have_the_router_matrices_of_their_split(self):
    names = [name for name in _dump("moh") if ".wg" in name]
    routers = [name.removesuffix(".weight") for name in names]
    expected = [
      *("blocks.0.attn.wg", "blocks.0.attn.wg_0", "blocks.0.attn.wg_1"),
      *("blocks.1.attn.wg", "blocks.1.attn.wg_0", "blocks.1.attn.wg_1"),
      "blocks.2.attn.wg_1",
      *("blocks.3.attn.wg", "blocks.3.attn.wg_0"),
    ]
    self.assertCountEqual(routers, expected)
    self.assertFalse([name for name in _dump("mha") if ".wg" in name])

  def test_patch_kernel_is_their_convolution(self):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(1, 4, 6, 3)).astype(np.float32)
    kernel = _random_params("moh")["patch"]["kernel"]
    tokens = np.asarray(patchify(jnp.asarray(x), 2)) @ kernel
    weight = _dump("moh")["x_embedder.proj.weight"]  # out, in, X, Y
    chex.assert_shape(weight, (8, 3, 2, 2))
    for row, column in np.ndindex(2, 3):
      window = x[0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
      expected = np.einsum("ocxy,xyc->o", weight, window)
      np.testing.assert_allclose(
        tokens[0, row * 3 + column], expected, rtol=1e-4, atol=1e-5
      )

  def test_queries_keys_and_values_are_rows_in_this_order(self):
    kernel = _random_params("moh")["blocks1"]["attn"]["qkv"]["kernel"][0]
    weight = _dump("moh")["blocks.2.attn.qkv.weight"]
    parts = [kernel[:, part].reshape(8, 24).T for part in range(3)]
    np.testing.assert_array_equal(weight, np.concatenate(parts))


class PositionTableTest(parameterized.TestCase):
  def test_dump_writes_the_table(self):
    expected = sincos_2d((2, 3), 8)[None]
    np.testing.assert_array_equal(_dump("moh")["pos_embed"], expected)

  def test_rounding_of_other_libraries_is_accepted(self):
    tensors = _dump("moh")
    tensors["pos_embed"] = tensors["pos_embed"] + 5e-6
    chex.assert_trees_all_equal(_load("moh", tensors), _random_params("moh"))

  @parameterized.named_parameters(
    ("one_value_off", lambda table: table + 1e-3 * (np.arange(8) == 3)),
    ("turned_grid", lambda table: table[:, [0, 3, 1, 4, 2, 5]]),
    ("zeros", np.zeros_like),
  )
  def test_other_table_is_refused(self, change):
    tensors = _dump("moh")
    tensors["pos_embed"] = change(tensors["pos_embed"])
    with self.assertRaisesRegex(
      ValueError, "pos_embed is not the fixed sine-cosine table of a 2 x 3 grid"
    ):
      _load("moh", tensors)

  def test_table_of_another_size_is_listed(self):
    tensors = _dump("moh")
    tensors["pos_embed"] = sincos_2d((3, 3), 8)[None]
    with self.assertRaisesRegex(
      ValueError, r"some\.file: .*pos_embed \(1, 9, 8\) instead of \(1, 6, 8\)"
    ):
      _load("moh", tensors)


if __name__ == "__main__":
  absltest.main()
