"""Released models: names, and every parameter's public name and shape."""

import functools
import gzip
import json
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.config import Config, released_model, released_models
from moh_jax.convert import rules
from moh_jax.convert.checkpoints import model_rules
from moh_jax.models.registry import make_model
from moh_jax.runtime.parameters import abstract_params, unbox

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_DIT_SPLITS = ("-90", "-75", "")  # the last: plain multi-head attention
_SHARES = ("small", 80), ("small", 75), ("base", 75), ("base", 50)
# Name -> the recorded table of its release.
_PUBLIC = {
  **{
    f"moh-vit-{size[0]}{share}": f"moh_transnext_{size}_{share}"
    for size, share in _SHARES
  },
  **{
    f"transnext-{size}": f"transnext_{size}"
    for size in ("micro", "tiny", "small", "base")
  },
  **{
    f"{kind.lower()}-{size.lower()}2{split}": f"{kind}-{size}/2{split}"
    for split in _DIT_SPLITS
    for kind in ("MoH-DiT" if split else "DiT",)
    for size in ("S", "B", "L", "XL")
  },
}
# Name -> the recorded table with the same parameters.
_LLAMA = {
  "moh-llama3-8b": "MoH-LLaMA3-8B",
  "llama3-8b-expanded": "MoH-LLaMA3-8B",
  "llama3-8b": "LLaMA3-8B",
}


@functools.cache
def _tables() -> dict:
  tables = {}
  for family in ("vit", "dit", "llm"):
    with gzip.open(_GOLDENS / f"param_tables_{family}.json.gz") as stream:
      tables |= json.load(stream)
  return tables


_RECORDED = json.loads(
  pathlib.Path(__file__).with_name("parameters.json").read_text()
)


def _params(name: str):
  """Shapes of the model's parameters; computes nothing."""
  return unbox(abstract_params(*make_model(Config(released_model(name)))))


def _tensors(name: str) -> dict[str, jax.ShapeDtypeStruct]:
  """The model's parameters under their public names; computes nothing."""
  dump = functools.partial(rules.dump_params, model_rules(released_model(name)))
  return jax.eval_shape(dump, _params(name))


class RegistryTest(parameterized.TestCase):
  def test_covers_every_released_model(self):
    self.assertCountEqual(released_models(), _RECORDED)
    recorded = {*_PUBLIC.values(), *_LLAMA.values()}
    self.assertCountEqual(_tables(), recorded)

  @parameterized.parameters(*sorted(_RECORDED.keys() - {*_PUBLIC, *_LLAMA}))
  @pytest.mark.integration
  def test_parameters_are_those_that_were_recorded(self, name):
    count = sum(leaf.size for leaf in jax.tree.leaves(_params(name)))
    self.assertEqual(count, _RECORDED[name])

  @parameterized.parameters(*sorted({*_PUBLIC, *_LLAMA}))
  @pytest.mark.integration
  def test_has_the_public_names_shapes_and_total(self, name):
    table = (_PUBLIC | _LLAMA)[name]
    public, tensors = _tables()[table], _tensors(name)
    shapes = {key: list(leaf.shape) for key, leaf in tensors.items()}
    self.assertEqual(shapes, public["params"])
    total = sum(leaf.size for leaf in tensors.values())
    self.assertEqual(total, public["total"])
    chex.assert_type(list(tensors.values()), jnp.float32)

  @parameterized.parameters(
    *((name, 1.0) for name in ("transnext-base", "dit-xl2", "llm-b")),
    *(
      (name, int(share) / 100)
      for name in released_models()
      for share in re.findall(r"moh-.*(\d\d)(?:-last)?$", name)
    ),
    ("moh-llama3-8b", 0.75),
    ("llama3-8b", 1.0),
  )
  def test_activates_the_share_it_is_named_for(self, name, share):
    found = released_model(name).activated_share
    self.assertAlmostEqual(found, share, delta=0.03)
