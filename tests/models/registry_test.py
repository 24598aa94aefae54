"""Released models: names, and every parameter's public name and shape."""

import functools
import gzip
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.convert import rules, vit
from moh_jax.models import registry
from moh_jax.models.vit import ViT
from moh_jax.training.state import abstract_params, unbox

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_PUBLIC = {
  "moh-vit-s80": "moh_transnext_small_80",
  "moh-vit-s75": "moh_transnext_small_75",
  "moh-vit-b75": "moh_transnext_base_75",
  "moh-vit-b50": "moh_transnext_base_50",
  "transnext-micro": "transnext_micro",
  "transnext-tiny": "transnext_tiny",
  "transnext-small": "transnext_small",
  "transnext-base": "transnext_base",
}


@functools.cache
def _tables() -> dict:
  with gzip.open(_GOLDENS / "param_tables_vit.json.gz") as stream:
    return json.load(stream)


def _tensors(name: str) -> dict[str, jax.ShapeDtypeStruct]:
  """The model's parameters under their public names; computes nothing."""
  config = registry.MODELS[name]
  images = jax.ShapeDtypeStruct((1, *config.image_size, 3), jnp.float32)
  params = unbox(abstract_params(ViT(config), (images,)))
  table = vit.model_rules(config)
  return jax.eval_shape(functools.partial(rules.dump_params, table), params)


class RegistryTest(parameterized.TestCase):
  def test_covers_every_released_classifier(self):
    self.assertCountEqual(registry.MODELS, _PUBLIC)
    self.assertCountEqual(_tables(), _PUBLIC.values())

  @parameterized.parameters(*_PUBLIC)
  def test_has_the_public_names_shapes_and_total(self, name):
    public, tensors = _tables()[_PUBLIC[name]], _tensors(name)
    shapes = {key: list(leaf.shape) for key, leaf in tensors.items()}
    self.assertEqual(shapes, public["params"])
    total = sum(leaf.size for leaf in tensors.values())
    self.assertEqual(total, public["total"])
    chex.assert_type(list(tensors.values()), jnp.float32)

  @parameterized.parameters(
    ("moh-vit-s80", 0.80),
    ("moh-vit-s75", 0.75),
    ("moh-vit-b75", 0.75),
    ("moh-vit-b50", 0.50),
    ("transnext-base", 1.0),
  )
  def test_activates_the_share_it_is_named_for(self, name, share):
    config = registry.get_model(name)
    # Heads of all layers, as the papers count them.
    pairs = list(zip(config.budgets(), config.depths))
    used = sum(budget.active * depth for budget, depth in pairs)
    present = sum(budget.num_heads * depth for budget, depth in pairs)
    self.assertAlmostEqual(used / present, share, delta=0.03)

  def test_unknown_name_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, "'moh-vit-s81' .*moh-vit-s80.*transnext-base"
    ):
      registry.get_model("moh-vit-s81")

  def test_without_router_changes_only_what_it_says(self):
    config = config_lib.without_router(
      registry.MODELS["moh-vit-b50"], num_classes=7
    )
    self.assertEqual(config.router, "none")
    self.assertEqual(config.num_classes, 7)
    self.assertEqual(config.shared_heads, config.num_heads)
    self.assertEqual(config.top_k, (0, 0, 0, 0))
    self.assertEqual(
      config.embed_dims, registry.MODELS["moh-vit-b50"].embed_dims
    )


if __name__ == "__main__":
  absltest.main()
