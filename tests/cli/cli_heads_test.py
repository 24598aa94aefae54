"""`heads`: what it prints and writes, and its report."""

import csv
import json
import re
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint
from moh_jax.runtime.steps import write_manifest
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
    rows = (
      {"step": 0, "split": "heads", "stage1.0": [0.25, 0.75]},
      {"step": 0, "split": "train", "loss": 3.0},
    )
    (self.root / "run/metrics.jsonl").write_text(
      "\n".join([*map(json.dumps, rows), "{damaged"])
    )
    numbers = self.root / "heads.json"
    out, page, text, _ = self._heads(
      *self.run_of, "--json", numbers, "--against", stored("vit")
    )
    self.assertIn(f"similarity of heads, other: {stored('vit')}, step 0", text)
    self.assertIn("features, other", text)
    headings = re.findall(r"<(?:h\d|th)>(.*?)</", page)
    self.assertNotIn("/", "".join(headings))  # no path is one
    steps = self.root / "run/checkpoints"
    shutil.copytree(steps / "0", steps / "1")  # another step is another model
    file = steps / "1/config/metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 1}))
    write_manifest(epath.Path(steps / "1"))
    argv = *self.run_of, "--batches=1", "--against", self.root / "run"
    text = self.done(*argv, "--step=0")
    self.assertIn(f"other: {self.root / 'run'}, step 1", text)
    self.assert_refused("must be another checkpoint", *argv)
    for name in ("load_by_class", "routing_maps", "load_over_steps", "curves"):
      for form, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        content = (out / f"{name}.{form}").read_bytes()
        self.assertTrue(content.startswith(begin), f"{name}.{form}")
    with (out / "heads.csv").open() as stream:
      rows = list(csv.DictReader(stream))
    with np.load(out / "heads.npz") as arrays:
      names, counts = arrays["class/names"], arrays["class/tokens"][0]
    for name, count in zip(names, counts):
      of = [
        row
        for row in rows
        if (row["grouping"], row["group"]) == ("class", name)
      ]
      self.assertEqual({int(row["tokens"]) for row in of}, {count})
      loads = [float(row["load"] or 0) for row in of if row["kind"] == "routed"]
      self.assertAlmostEqual(sum(loads), min(count, 1), places=4)
    report = json.loads(numbers.read_text())
    self.assertEqual(report["layers"][0]["layer"], "stage1.0")
    self.assertIn("taken for", page)

  @pytest.mark.integration
  def test_models_and_layers_without_routed_heads_say_so(self):
    plain = config_lib.without_router(tiny.deterministic_config().model)
    self._save(router=plain.router, top_k=plain.top_k)
    argv = *self.run_of, "--batches=1"
    out, page, text, _ = self._heads(*argv)
    self.assertIn("it has no router", text)
    self.assertIn("it has no router", page)
    self.assertIn("taken for", page)  # images with their classes all the same
    self.assertFalse((out / "load_by_class.png").exists())
    shutil.rmtree(self.root / "run")
    # The first stage has no routed heads; then none of the second are selected.
    self._save(shared_heads=(2, 2), top_k=(0, 1), depths=(1, 1))
    self.assertRegex(self.done(*argv), r"stage1\.0 .* none routed")
    self.assertRegex(self.done(*argv, "--top-k=0"), r"stage2\.0 .* none routed")

  @pytest.mark.integration
  def test_collapsed_routers_and_names_of_any_bytes(self):
    names = ("a$b_{$c", "caf\udce9", *"23456789")
    self._save(names, zeroed="routed")
    data = self.root / "data"
    put(data, *(f"{name}/0.png" for name in names[:9]))
    argv = *self.run_of, "--data", data, "--maps=10"
    out, page, text, _ = self._heads(*argv)
    for said in (page, text):
      self.assertRegex(said, r"What stands out: .*stage2\.1.* \(collapsed")
    self.assertIn(b"caf\xe9", (out / "heads.csv").read_bytes())
    self.assertIn("caf?", page)

  @pytest.mark.integration
  def test_diffusion_model(self):
    tiny_checkpoint.SAVED["dit"](self.root / "run")
    out, page, _, _ = self._heads(*self.run_of, "--batches=1")
    self.assertTrue((out / "load_by_timestep.svg").exists())
    self.assertIn("generated samples", page)
