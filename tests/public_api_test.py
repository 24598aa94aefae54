"""The names that users import, and what importing them costs."""

import ast
import pathlib
import re
import tomllib

from absl.testing import absltest

import moh_jax
from tests.two_processes import python

_ROOT = pathlib.Path(__file__).parents[1]
_PROMISED = """
  MoHAttention HeadRouter HeadMix HeadBudget RouterConfig attention collect_aux
  ViT DiT LLM get_model list_models restore Generator load_config train
  register_family Family register_router Router Routing
""".split()
_HEAVY = ("jax", "flax", "chex", "numpy", "orbax", "grain", "ml_collections")


class PublicApiTest(absltest.TestCase):
  def test_every_promised_name_is_listed_and_there(self):
    self.assertContainsSubset(_PROMISED, moh_jax.__all__)
    for name in moh_jax.__all__:
      self.assertIsNotNone(getattr(moh_jax, name), name)

  def test_all_is_all(self):
    tree = ast.parse((_ROOT / "moh_jax" / "__init__.py").read_text())
    imported = {
      (node.module, alias.name)
      for node in ast.walk(tree)
      if isinstance(node, ast.ImportFrom)
      for alias in node.names
    }
    lazy = {
      (f"moh_jax.{module}", name)
      for module, names in moh_jax._LAZY.items()
      for name in names
    }
    self.assertContainsSubset(lazy, imported)
    public = {name for _, name in imported} | {"ImageClassifierFamily"}
    self.assertEqual(public, set(moh_jax.__all__))
    self.assertContainsSubset(moh_jax.__all__, dir(moh_jax))

  def test_import_loads_nothing_heavy(self):
    code = (
      "import sys, moh_jax, moh_jax.config; "
      "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    status, out, err = python("-c", code)
    self.assertEqual(status, 0, err)
    self.assertNoCommonElements(out.split(), _HEAVY)

  def test_train_brings_what_requirements_txt_lists(self):
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    listed = re.sub("#.*", "", (_ROOT / "requirements.txt").read_text()).split()
    extra = project["optional-dependencies"]["train"]
    self.assertCountEqual(project["dependencies"] + extra, listed)

  def test_list_models_says_what_each_is(self):
    models = moh_jax.list_models()
    self.assertEqual(
      models["moh-dit-s2-90"]["formats"], ("moh-dit",), models.keys()
    )
    for name, what in models.items():
      _, section = moh_jax.get_model(name)
      self.assertEqual(what["family"], section.family)
      self.assertEqual(what["activated_share"], section.activated_share)
      self.assertNotEmpty(what["formats"], name)

  def test_get_model_gives_network_and_config(self):
    network, config = moh_jax.get_model("moh-dit-s2-90")
    self.assertIsInstance(network, moh_jax.DiT)
    self.assertEqual(network.config, config)
    self.assertEqual((config.width, config.depth), (384, 12))
