"""`python -m moh_jax heads`: what it prints and writes, and its report."""

import csv
import dataclasses
import html.parser
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from flax import traverse_util
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.evaluation import head_stats
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

  def _heads(self, checkpoint_folder, *options):
    out = self.folder / "out"
    argv = ("--checkpoint", checkpoint_folder, "--out", out, *options)
    status, text, error = tiny_checkpoint.call("heads", *argv)
    self.assertEqual(status, 0, error)
    return out, text, error

  def _page(self, out):
    """The report; checks that it is whole by itself."""
    page = (out / "report.html").read_text()
    self.assertLess(len(page), 5 << 20)
    links = _Links()
    links.feed(page)
    links.close()
    self.assertNotEmpty(links.found)
    for link in links.found:
      self.assertStartsWith(link, "data:image/png;base64,")
    self.assertNotIn("<script", page)
    return page

  def test_classifier(self):
    run = self.folder / "run"
    other = self.folder / "other"
    tiny_checkpoint.save(str(run))
    tiny_checkpoint.save(str(other))
    lines = [json.dumps(row) for row in _ROWS]
    (run / "metrics.jsonl").write_text("\n".join([*lines, "{damaged"]))
    numbers = self.folder / "heads.json"
    out, text, _ = self._heads(run, "--json", numbers, "--against", other)
    self.assertIn("similarity of heads", text)
    self.assertIn(f"features, {run}, step 0", text)
    self.assertIn(f"features, {other}, step 0", text)
    self.assertIn("stage1.0", text)
    for name in ("load_by_class", "routing_maps", "load_over_steps", "curves"):
      for form, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        content = (out / f"{name}.{form}").read_bytes()
        self.assertTrue(content.startswith(begin), f"{name}.{form}")
    with (out / "heads.csv").open() as stream:
      rows = list(csv.DictReader(stream))
    with np.load(out / "heads.npz") as arrays:
      tokens = {
        (layer, name): count
        for layer, counts in zip(arrays["layers"], arrays["class/tokens"])
        for name, count in zip(arrays["class/names"], counts)
      }
      top_k = arrays["top_k"].tolist()
    for (layer, name), count in tokens.items():
      of = [
        row
        for row in rows
        if (row["grouping"], row["layer"], row["group"])
        == ("class", layer, name)
      ]
      self.assertTrue(all(int(row["tokens"]) == count for row in of))
      loads = [float(r["load"] or "nan") for r in of if r["kind"] == "routed"]
      if count:
        self.assertAlmostEqual(sum(loads), top_k[0], places=4)
    report = json.loads(numbers.read_text())
    self.assertEqual(report["layers"][0]["layer"], "stage1.0")
    self.assertIn("taken for", self._page(out))

  def test_text_files_are_tasks_and_tokens_are_coloured(self):
    run = self.folder / "run"
    tiny_text_model.save(run)
    (self.folder / "python.txt").write_text("def f(x): return x < 3\n" * 4)
    (self.folder / "prose.txt").write_text("It </script> rained. " * 5)
    out, text, _ = self._heads(
      *(run, "--batches", "1", "--batch-size", "8"),
      *("--data", self.folder / "python.txt", self.folder / "prose.txt"),
    )
    self.assertIn("importance", text)
    with (out / "heads.csv").open() as stream:
      tasks = {r["group"] for r in csv.DictReader(stream)}
    self.assertEqual(tasks, {"all", "python.txt", "prose.txt"})
    page = self._page(out)
    self.assertRegex(
      page, r'<span title="head \d" style="background:#\w{8}">I<'
    )
    self.assertNotIn("</script>", page)

  def test_multi_head_attention_has_no_loads(self):
    config = tiny.deterministic_config()
    model = config_lib.without_router(config.model)
    config = dataclasses.replace(config, model=model)
    params = tiny.random_params(config)
    run = self.folder / "run"
    metadata = checkpoint.Metadata(config, tuple("0123456789"))
    checkpoint.save_params(str(run), params, metadata)
    out, text, _ = self._heads(run, "--batches", "1")
    self.assertIn("it has no router", text)
    page = (out / "report.html").read_text()
    self.assertIn("it has no router", page)
    self.assertIn("taken for", page)  # images with their classes all the same
    self.assertFalse((out / "load_by_class.png").exists())

  def test_layers_without_routed_heads_say_so(self):
    config = tiny.deterministic_config()
    # The first stage has no routed heads; then none of the second are selected.
    model = dataclasses.replace(
      config.model, shared_heads=(2, 2), top_k=(0, 1), depths=(1, 1)
    )
    config = dataclasses.replace(config, model=model)
    run = self.folder / "run"
    metadata = checkpoint.Metadata(config, tuple("0123456789"))
    checkpoint.save_params(str(run), tiny.random_params(config), metadata)
    out, text, _ = self._heads(run, "--batches", "1", "--maps", "2")
    self.assertRegex(text, r"stage1\.0 .* none routed")
    self.assertTrue((out / "load_by_class.png").exists())
    status, text, error = tiny_checkpoint.call(
      "heads", "--checkpoint", run, "--batches", "1", "--top-k", "0"
    )
    self.assertEqual(status, 0, error)
    self.assertRegex(text, r"stage2\.0 .* none routed")

  def test_collapsed_routers_and_classes_without_examples_are_named(self):
    config = tiny.deterministic_config()
    flat = traverse_util.flatten_dict(tiny.random_params(config))
    params = traverse_util.unflatten_dict(
      {p: np.zeros_like(x) if p[-1] == "routed" else x for p, x in flat.items()}
    )
    run = self.folder / "run"
    metadata = checkpoint.Metadata(config, tuple("0123456789"))
    checkpoint.save_params(str(run), params, metadata)
    out, _, error = self._heads(run, "--batches", "1", "--maps", "2")
    line = "the router of layer stage2.1 has collapsed"
    self.assertIn(line, error)
    self.assertIn("groups by class have no example", error)
    self.assertIn(line, (out / "report.html").read_text())

  def test_samples_of_a_diffusion_model(self):
    run = self.folder / "run"
    tiny_checkpoint.save_dit(str(run))
    out, _, _ = self._heads(run, "--batches", "2")
    self.assertTrue((out / "load_by_timestep.svg").exists())
    page = (out / "report.html").read_text()
    self.assertIn("generated samples", page)

  def test_another_step_of_the_same_run(self):
    run = self.folder / "run"
    tiny_checkpoint.save_dit(str(run))
    steps = run / "checkpoints"
    shutil.copytree(steps / "0", steps / "1")
    argv = ("heads", "--checkpoint", run, "--batches", 1, "--against", run)
    status, text, error = tiny_checkpoint.call(*argv, "--step", 0)
    self.assertEqual(status, 0, error)
    for step in (0, 1):
      self.assertIn(f"patterns, {run}, step {step}", text)
    status, _, error = tiny_checkpoint.call(*argv)
    self.assertEqual(status, 2)
    self.assertIn("must be another checkpoint", error)

  @parameterized.parameters(
    (False, "its own data are not those of .*, give --data for both"),
    (True, "MISSING"),
  )
  def test_what_cannot_be_compared_is_refused_before_measuring(
    self, is_missing, message
  ):
    run, other = self.folder / "run", self.folder / "other"
    tiny_checkpoint.save(str(run))
    if is_missing:
      other = self.folder / "MISSING"
    else:
      tiny_checkpoint.save_dit(str(other))
    with mock.patch.object(
      head_stats, "head_stats", side_effect=AssertionError
    ):
      status, _, error = tiny_checkpoint.call(
        *("heads", "--checkpoint", run, "--against", other)
      )
    self.assertEqual(status, 2)
    self.assertRegex(error, message)

  def test_layers_of_different_numbers_of_heads_have_no_importance(self):
    run = self.folder / "run"
    model = dataclasses.replace(
      tiny_text_model.CONFIG.model, num_heads=(4, 2), top_k=(2, 1)
    )
    config = dataclasses.replace(tiny_text_model.CONFIG, model=model)
    tiny_text_model.save(run, config)
    (self.folder / "prose.txt").write_text("It rained. " * 5)
    status, text, error = tiny_checkpoint.call(
      *("heads", "--checkpoint", run, "--batches", 1),
      *("--data", self.folder / "prose.txt"),
    )
    self.assertEqual(status, 0, error)
    self.assertNotIn("importance", text)

  def test_class_names_of_any_bytes(self):
    run = self.folder / "run"
    names = ("a$b_{$c", "caf\udce9", *"23456789")
    config = tiny.deterministic_config()
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(str(run), tiny.random_params(config), metadata)
    data = self.folder / "data"
    for number, name in enumerate(names):
      folder = data / name
      folder.mkdir(parents=True)
      Image.new("L", (8, 8), 20 * number).save(folder / "0.png")
    out, _, _ = self._heads(run, "--data", data, "--maps", "10")
    self.assertIn(b"caf\xe9", (out / "heads.csv").read_bytes())
    self.assertIn("caf?", (out / "report.html").read_text())

  @parameterized.parameters(
    (("--data", "a", "b"), "must be one directory"),
    (("--data", "MISSING"), "MISSING"),
    (("--batch-size", "0"), "must be at least 1"),
  )
  def test_bad_input(self, options, message):
    run = self.folder / "run"
    tiny_checkpoint.save(str(run))
    status, _, error = tiny_checkpoint.call(
      "heads", "--checkpoint", run, *options
    )
    self.assertEqual(status, 2)
    self.assertRegex(error, message)
    self.assertLen(error.splitlines(), 1)

  def test_a_file_without_text(self):
    run = self.folder / "run"
    tiny_text_model.save(run)
    (self.folder / "empty.txt").write_text("")
    status, _, error = tiny_checkpoint.call(
      *("heads", "--checkpoint", run, "--data", self.folder / "empty.txt")
    )
    self.assertEqual(status, 2)
    self.assertRegex(error, r"empty\.txt: fewer than two tokens")


if __name__ == "__main__":
  absltest.main()
