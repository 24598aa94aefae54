"""`heads`: what it prints and writes, and its report."""

import json
import re
import shutil

import jax
import pytest

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import stored
from tests.data.tiny_images import put
from tests.training import tiny


class HeadsTest(tiny_checkpoint.CommandTest):
  COMMAND = "heads"

  def setUp(self):
    super().setUp()
    self.run_of = "--checkpoint", self.root / "run"

  def _heads(self, *argv):
    """Folder, page, stdout and stderr of a report."""
    out = self.root / "out"
    status, text, error = self.call("--out", out, *argv)
    self.assertEqual(status, 0, error)
    page = (out / "report.html").read_text()
    self.assertLess(len(page), 5 << 20)
    links = re.findall(r"<\w[^>]*\b(?:src|href)\s*=\s*['\"]?([^'\">]*)", page)
    for link in links:  # the page is whole by itself
      self.assertStartsWith(link, "data:image/png;base64,")
    self.assertNotIn("<script", page)
    self.assertNotEmpty(links)
    return out, page, text, error

  def _save(self, names=tiny_checkpoint.DIGITS, zeroed="", **model):
    """A tiny classifier; parameters whose name is `zeroed` are zero."""
    config = tiny.deterministic_config(model=model)
    params = jax.tree_util.tree_map_with_path(
      lambda path, x: x * (path[-1].key != zeroed), tiny.random_params(config)
    )
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(str(self.root / "run"), params, metadata)

  @pytest.mark.integration
  def test_classifier(self):
    tiny_checkpoint.SAVED["vit"](self.root / "run")
    numbers = self.root / "heads.json"
    out, page, _, _ = self._heads(*self.run_of, "--json", numbers)
    for name in ("load_by_class", "routing_maps", "similarity"):
      content = (out / f"{name}.png").read_bytes()
      self.assertTrue(content.startswith(b"\x89PNG"), name)
    found = json.loads(numbers.read_text())
    self.assertEqual(found["layers"][0]["layer"], "stage1.0")
    groups = found["load_by_group"]["class"]
    self.assertEqual(tuple(groups), tiny_checkpoint.CLASS_NAMES)
    self.assertIn("patterns", page)

  @pytest.mark.integration
  def test_tokens_of_training_text_are_coloured(self):
    _, page, text, _ = self._heads(
      *("--checkpoint", stored("text"), "--batches=1", "--batch-size=8")
    )
    self.assertIn("Importance", text)
    self.assertRegex(page, r'<span title="head \d" style="background:#\w{8}">')

  @pytest.mark.integration
  def test_models_and_layers_without_routed_heads_say_so(self):
    plain = config_lib.without_router(tiny.deterministic_config().model)
    self._save(router=plain.router, top_k=plain.top_k)
    argv = *self.run_of, "--batches=1"
    out, page, text, _ = self._heads(*argv)
    self.assertIn("it has no router", text)
    self.assertIn("it has no router", page)
    self.assertFalse((out / "load_by_class.png").exists())
    shutil.rmtree(self.root / "run")
    # The first stage has no routed heads; then none of the second are selected.
    self._save(shared_heads=(2, 2), top_k=(0, 1), depths=(1, 1))
    self.assertRegex(self.done(*argv), r"stage1\.0 .* none routed")
    self.assertRegex(self.done(*argv, "--top-k=0"), r"stage2\.0 .* none routed")

  @pytest.mark.integration
  def test_collapsed_routers_and_names_of_any_letters(self):
    names = ("a$b_{$c", "caf\u00e9", *"23456789")
    self._save(names, zeroed="routed")
    data = self.root / "data"
    put(data, *(f"{name}/0.png" for name in names[:9]))
    argv = *self.run_of, "--data", data
    _, page, text, _ = self._heads(*argv)
    for said in (page, text):
      self.assertRegex(said, r"What stands out: .*stage2\.1.* \(collapsed")

  @pytest.mark.integration
  def test_diffusion_model(self):
    tiny_checkpoint.SAVED["dit"](self.root / "run")
    out, *_ = self._heads(*self.run_of, "--batches=1")
    self.assertTrue((out / "load_by_timestep.png").exists())
