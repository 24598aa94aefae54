"""`heads`: what it prints and writes, and its report."""

import csv
import dataclasses
import html.parser
import json
import pathlib
import shutil

import numpy as np
from absl.testing import absltest, parameterized
from flax import traverse_util
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.inference import tiny_text_model
from tests.training import tiny

_ROWS = [
  {"step": 1, "split": "train", "loss": 2.5},
  {"step": 0, "split": "heads", "stage1.0": [0.25, 0.75]},
  {"step": 0, "split": "train", "loss": 3.0},
]


class _Links(html.parser.HTMLParser):
  """Collects what a page would load."""

  def __init__(self):
    super().__init__()
    self.found = []

  def handle_starttag(self, tag, attrs):
    self.found += [v for name, v in attrs if name in ("src", "href")]


class HeadsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.run = self.folder / "run"

  def _call(self, *options):
    return tiny_checkpoint.call("heads", "--checkpoint", self.run, *options)

  def _heads(self, *options):
    """Folder, page, stdout and stderr of a report."""
    out = self.folder / "out"
    status, text, error = self._call("--out", out, *options)
    self.assertEqual(status, 0, error)
    page = (out / "report.html").read_text()
    self.assertLess(len(page), 5 << 20)
    links = _Links()
    links.feed(page)
    links.close()
    for link in links.found:  # the page is whole by itself
      self.assertStartsWith(link, "data:image/png;base64,")
    self.assertNotIn("<script", page)
    self.assertNotEmpty(links.found)
    return out, page, text, error

  def _save(self, names=tuple("0123456789"), zeroed="", **model):
    """A tiny classifier; parameters whose name is `zeroed` are zero."""
    config = tiny.deterministic_config()
    changed = dataclasses.replace(config.model, **model)
    config = dataclasses.replace(config, model=changed)
    flat = traverse_util.flatten_dict(tiny.random_params(config))
    flat = {p: x * (p[-1] != zeroed) for p, x in flat.items()}
    params = traverse_util.unflatten_dict(flat)
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(str(self.run), params, metadata)

  def test_classifier(self):
    other = self.folder / "other"
    for folder in (self.run, other):
      tiny_checkpoint.save(str(folder))
    lines = [json.dumps(row) for row in _ROWS]
    (self.run / "metrics.jsonl").write_text("\n".join([*lines, "{damaged"]))
    numbers = self.folder / "heads.json"
    out, page, text, _ = self._heads("--json", numbers, "--against", other)
    self.assertIn("similarity of heads", text)
    self.assertIn(f"features, {self.run}, step 0", text)
    self.assertIn(f"features, {other}, step 0", text)
    self.assertIn("stage1.0", text)
    for name in ("load_by_class", "routing_maps", "load_over_steps", "curves"):
      for form, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        content = (out / f"{name}.{form}").read_bytes()
        self.assertTrue(content.startswith(begin), f"{name}.{form}")
    with (out / "heads.csv").open() as stream:
      rows = list(csv.DictReader(stream))
    with np.load(out / "heads.npz") as arrays:
      names, counts = arrays["class/names"], arrays["class/tokens"][0]
      top_k = arrays["top_k"].tolist()
    for name, count in zip(names, counts):
      group = ("class", "stage1.0", name)
      of = [r for r in rows if (r["grouping"], r["layer"], r["group"]) == group]
      self.assertTrue(all(int(row["tokens"]) == count for row in of))
      loads = [float(r["load"] or "nan") for r in of if r["kind"] == "routed"]
      if count:
        self.assertAlmostEqual(sum(loads), top_k[0], places=4)
    report = json.loads(numbers.read_text())
    self.assertEqual(report["layers"][0]["layer"], "stage1.0")
    self.assertIn("taken for", page)

  def test_text_files_are_tasks_and_tokens_are_coloured(self):
    tiny_text_model.save(self.run)
    (self.folder / "python.txt").write_text("def f(x): return x < 3\n" * 4)
    (self.folder / "prose.txt").write_text("It </script> rained. " * 5)
    out, page, text, _ = self._heads(
      *("--batches", "1", "--batch-size", "8"),
      *("--data", self.folder / "python.txt", self.folder / "prose.txt"),
    )
    self.assertIn("importance", text)
    with (out / "heads.csv").open() as stream:
      tasks = {r["group"] for r in csv.DictReader(stream)}
    self.assertEqual(tasks, {"all", "python.txt", "prose.txt"})
    self.assertRegex(
      page, r'<span title="head \d" style="background:#\w{8}">I<'
    )
    self.assertNotIn("</script>", page)

  def test_multi_head_attention_has_no_loads(self):
    plain = config_lib.without_router(tiny.deterministic_config().model)
    self._save(router=plain.router, top_k=plain.top_k)
    out, page, text, _ = self._heads("--batches", "1")
    self.assertIn("it has no router", text)
    self.assertIn("it has no router", page)
    self.assertIn("taken for", page)  # images with their classes all the same
    self.assertFalse((out / "load_by_class.png").exists())

  def test_layers_without_routed_heads_say_so(self):
    # The first stage has no routed heads; then none of the second are selected.
    self._save(shared_heads=(2, 2), top_k=(0, 1), depths=(1, 1))
    out, _, text, _ = self._heads("--batches", "1", "--maps", "2")
    self.assertRegex(text, r"stage1\.0 .* none routed")
    self.assertTrue((out / "load_by_class.png").exists())
    status, text, error = self._call("--batches", "1", "--top-k", "0")
    self.assertEqual(status, 0, error)
    self.assertRegex(text, r"stage2\.0 .* none routed")

  def test_collapsed_routers_and_names_of_any_bytes(self):
    names = ("a$b_{$c", "caf\udce9", *"23456789")
    self._save(names, zeroed="routed")
    data = self.folder / "data"
    for number, name in enumerate(names[:9]):
      (data / name).mkdir(parents=True)
      Image.new("L", (8, 8), 20 * number).save(data / name / "0.png")
    out, page, _, error = self._heads("--data", data, "--maps", "10")
    line = "the router of layer stage2.1 has collapsed"
    self.assertIn(line, error)
    self.assertIn(line, page)
    self.assertIn(b"caf\xe9", (out / "heads.csv").read_bytes())
    self.assertIn("caf?", page)

  def test_diffusion_model_and_another_step_of_it(self):
    tiny_checkpoint.save_dit(str(self.run))
    out, page, _, _ = self._heads("--batches", "2")
    self.assertTrue((out / "load_by_timestep.svg").exists())
    self.assertIn("generated samples", page)
    steps = self.run / "checkpoints"
    shutil.copytree(steps / "0", steps / "1")
    argv = ("--batches", 1, "--against", self.run)
    status, text, error = self._call(*argv, "--step", 0)
    self.assertEqual(status, 0, error)
    for step in (0, 1):
      self.assertIn(f"patterns, {self.run}, step {step}", text)
    status, _, error = self._call(*argv)
    self.assertEqual(status, 2)
    self.assertIn("must be another checkpoint", error)


if __name__ == "__main__":
  absltest.main()
