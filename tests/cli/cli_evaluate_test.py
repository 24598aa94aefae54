import csv
import json
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.training import tiny


class EvaluateCommandTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.root = pathlib.Path(root)
    cls.workdir = cls.root / "run"
    tiny_checkpoint.save(cls.workdir)

  def _call(self, *argv):
    return tiny_checkpoint.call("evaluate", "--checkpoint", self.workdir, *argv)

  def _metrics(self, *argv):
    status, out, err = self._call(*argv, "--json", "-")
    self.assertEqual(status, 0, err)
    return json.loads(out)  # one object and nothing else

  def test_json_is_alone_on_stdout(self):
    metrics = self._metrics()
    self.assertContainsSubset(
      {"accuracy", "activated_share", "examples", "step"}, metrics
    )
    self.assertEqual((metrics["examples"], metrics["step"]), (20, 0))
    self.assertBetween(metrics["accuracy"], 0, 1)

  @parameterized.parameters((0, 0.25), (1, 0.5), (3, 1.0))
  def test_top_k_changes_the_activated_share(self, top_k, share):
    metrics = self._metrics("--top-k", top_k)
    self.assertAlmostEqual(metrics["activated_share"], share, places=5)

  @parameterized.parameters((1e-6, 0.5), (1.0, 1.0))
  def test_heads_until_their_scores_reach_p(self, p, share):
    metrics = self._metrics("--head-top-p", p)
    self.assertAlmostEqual(metrics["activated_share"], share, places=5)

  @parameterized.parameters((), ("--per-class", "classes.csv"))
  def test_share_of_the_heads_counts_no_padding(self, *argv):
    argv = [part.replace("classes", f"{self.root}/c") for part in argv]
    shares = [
      self._metrics("--head-top-p", "0.6", "--batch-size", size, *argv)
      for size in (8, 40)  # 20 examples
    ]
    first, second = (row["activated_share"] for row in shares)
    self.assertAlmostEqual(first, second, places=6)

  def test_a_number_and_scores_exclude_each_other(self):
    status, _, err = self._call("--head-top-p", 0.5, "--top-k", 1)
    self.assertEqual(status, 2)
    self.assertIn("--head-top-p 0.5 and --top-k exclude each other", err)

  def test_plot_of_several_top_k(self):
    file = self.root / "dial.svg"
    status, _, err = self._call("--top-k", 0, "--top-k", 1, "--plot", file)
    self.assertEqual(status, 0, err)
    self.assertIn("<svg", file.read_text())

  @parameterized.parameters(
    (("--plot", "dial.svg"), "needs several --top-k"),
    (("--plot", "dial.jpg", "--top-k", 0, "--top-k", 1), "must end in .png"),
  )
  def test_plots_that_cannot_be(self, options, message):
    status, _, err = self._call(*options)
    self.assertEqual(status, 2)
    self.assertIn(message, err)

  def test_batch_size_changes_no_figure(self):
    ours, theirs = self._metrics(), self._metrics("--batch-size", 24)
    self.assertEqual(ours.keys(), theirs.keys())
    for name, value in ours.items():
      self.assertAlmostEqual(value, theirs[name], places=5)

  def test_some_examples_alone(self):
    self.assertEqual(self._metrics("--examples", 6)["examples"], 6)
    self.assertEqual(self._metrics("--examples", 99)["examples"], 20)

  def test_gate_form_changes_the_loss(self):
    ours, paper = self._metrics(), self._metrics("--gate-form", "paper")
    self.assertNotAlmostEqual(ours["loss"], paper["loss"], places=6)
    self.assertEqual(ours["activated_share"], paper["activated_share"])

  def test_prints_a_line_per_figure(self):
    status, out, _ = self._call()
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^accuracy: 0\.\d{4}$")
    self.assertRegex(out, r"(?m)^examples: 20$")

  def test_data_is_another_directory(self):
    root = self.root / "images"
    for i, name in enumerate(tiny_checkpoint.CLASS_NAMES):
      (root / "val" / name).mkdir(parents=True)
      pixels = np.full((9, 9, 3), 40 * i, np.uint8)
      Image.fromarray(pixels).save(root / "val" / name / "1.png")
    self.assertEqual(self._metrics("--data", root)["examples"], 6)

  def test_models_of_shards_and_of_folders_read_both(self):
    shards = self.root / "shards"
    folder = self._folder()
    status, _, err = tiny_checkpoint.call(
      *(
        "prepare",
        "pack-images",
        "--data",
        folder,
        "--out",
        shards,
        "--split",
        "val",
      )
    )
    self.assertEqual(status, 0, err)
    classes = tiny_checkpoint.CLASS_NAMES[:4]
    config = config_lib.apply_overrides(
      tiny_checkpoint.CONFIG, "model", num_classes=4
    )
    for source in ("array_record", "image_folder"):
      of_source = config_lib.apply_overrides(
        config, "data", source=source, path=str(shards)
      )
      workdir = self.root / source
      params = tiny.random_params(of_source)
      metadata = checkpoint.Metadata(of_source, classes)
      checkpoint.save_params(workdir, params, metadata)
      for data in (shards, folder):
        status, out, err = tiny_checkpoint.call(
          *("evaluate", "--checkpoint", workdir, "--data", data, "--json", "-")
        )
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["examples"], 12)

  def _folder(self):
    root = self.root / "plain"
    if not root.exists():
      for i, name in enumerate(tiny_checkpoint.CLASS_NAMES[:4]):
        (root / name).mkdir(parents=True)
        for j in range(3):
          pixels = np.full((9, 9, 3), 40 * i + j, np.uint8)
          Image.fromarray(pixels).save(root / name / f"{name}{j}.png")
    return root

  def test_folder_of_some_classes_is_scored_whole(self):
    metrics = self._metrics("--data", self._folder())
    self.assertEqual(metrics["examples"], 12)

  def test_scores_of_every_class(self):
    target = self.root / "classes.csv"
    plain = self._metrics("--data", self._folder())
    status, out, err = self._call(
      "--data", self._folder(), "--per-class", target
    )
    self.assertEqual(status, 0, err)
    with open(target, newline="") as file:
      rows = list(csv.DictReader(file))
    self.assertEqual(
      [row["class"] for row in rows], list(tiny_checkpoint.CLASS_NAMES)
    )
    counts = [int(row["examples"]) for row in rows]
    self.assertEqual(counts, [3] * 4 + [0] * 2)
    right = sum(3 * float(row["accuracy"] or 0) for row in rows)
    self.assertAlmostEqual(right / 12, plain["accuracy"], places=6)
    self.assertIn(f"accuracy: {plain['accuracy']:.4f}", out)

  def test_labels_of_a_file(self):
    names = [
      f"{n}{j}.png" for n in tiny_checkpoint.CLASS_NAMES[:4] for j in range(3)
    ]
    file = self.root / "labels.json"
    every = list(range(6))
    file.write_text(json.dumps({name: every for name in names}))
    metrics = self._metrics("--data", self._folder(), "--labels", file)
    self.assertEqual((metrics["accuracy"], metrics["examples"]), (1.0, 12))
    file.write_text(json.dumps([[]] * 11 + [[0]]))
    metrics = self._metrics("--data", self._folder(), "--labels", file)
    self.assertEqual(metrics["examples"], 1)

  @parameterized.parameters((), tiny_checkpoint.CLASS_NAMES)
  def test_labels_are_the_models_classes(self, *names):
    workdir = self.root / f"of_{len(names)}"
    metadata = checkpoint.Metadata(tiny_checkpoint.CONFIG, names)
    params = tiny.random_params(tiny_checkpoint.CONFIG)
    checkpoint.save_params(workdir, params, metadata)
    file = self.root / "numbers.json"

    def call(labels):
      file.write_text(json.dumps(labels))
      argv = ("--checkpoint", workdir, "--labels", file, "--json", "-")
      return tiny_checkpoint.call("evaluate", *argv)

    every = tiny_checkpoint.CLASS_NAMES if names else tuple("012345")
    for labels in (list(range(6)), list(every)):
      status, out, err = call([labels] * 20)
      self.assertEqual(status, 0, err)
      self.assertEqual(json.loads(out)["accuracy"], 1.0)
    status, out, err = call(["tiger"] * 20)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, "0' has the label 'tiger', which is none of the")

  def test_several_top_k_are_a_table(self):
    argv = ("--top-k", "0", "--top-k", "3")
    found = self._metrics(*argv)
    self.assertEqual([run["top_k"] for run in found["runs"]], [[0], [3]])
    for run, top_k in zip(found["runs"], (0, 3)):
      alone = self._metrics("--top-k", top_k)
      for name in ("accuracy", "loss", "activated_share"):
        self.assertEqual(run[name], alone[name], name)
    status, out, _ = self._call(*argv)
    self.assertEqual(status, 0)
    self.assertLen(out.splitlines(), 3)

  @parameterized.parameters(
    (("--labels", "/nope.json"), "/nope.json: no such file"),
    (
      ("--top-k", "1", "--top-k", "2", "--per-class", "x.csv"),
      "--per-class x.csv takes one --top-k",
    ),
    (("--top-k", "4"), "top_k=4 must be in [0, 3]"),
    (("--top-k", "1,1"), "model.top_k=(1, 1) must have one value per stage"),
    (("--batch-size", "9"), "eval.batch_size=9 must be a multiple of"),
    (("--batch-size", "-8"), "eval.batch_size=-8 must be at least 1"),
    (("--batch-size", "0"), "eval.batch_size=0 must be at least 1"),
    (("--examples", "-1"), "eval.examples=-1 must be at least 0"),
    (("--step", "7"), "no checkpoint of step 7; it has [0]"),
    (("--data", "/nope/images"), "data.path='/nope/images'"),
  )
  def test_bad_argument_is_one_line_that_names_it(self, argv, message):
    status, out, err = self._call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)


class EvaluateDiffusionTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = cls.enterClassContext(tempfile.TemporaryDirectory())
    tiny_checkpoint.save_dit(cls.workdir)

  def _call(self, *argv):
    return tiny_checkpoint.call("evaluate", "--checkpoint", self.workdir, *argv)

  def test_prints_the_losses_on_the_held_out_split(self):
    status, out, err = self._call()
    self.assertEqual(status, 0, err)
    metrics = dict(line.split(": ") for line in out.splitlines())
    self.assertEqual(
      metrics.keys(),
      {"loss", "mse", "vb", "activated_share", "examples", "step"},
    )
    self.assertEqual(metrics["examples"], "359")
    loss, mse, bound = (float(metrics[n]) for n in ("loss", "mse", "vb"))
    self.assertAlmostEqual(loss, mse + bound, delta=2e-4)

  def test_top_k_changes_the_activated_share(self):
    status, out, err = self._call("--top-k", "0,2", "--json", "-")
    self.assertEqual(status, 0, err)
    share = json.loads(out)["activated_share"]
    self.assertAlmostEqual(share, (1 + 4) / (2 + 4), places=5)

  def test_share_of_the_heads_counts_no_padding(self):
    shares = []
    for size in (8, 120):  # 119 examples
      argv = ("--examples", 119, "--batch-size", size, "--head-top-p", 0.6)
      status, out, err = self._call(*argv, "--json", "-")
      self.assertEqual(status, 0, err)
      shares.append(json.loads(out)["activated_share"])
    self.assertAlmostEqual(*shares, places=6)

  def test_classes_are_for_classifiers(self):
    status, out, err = self._call("--per-class", "x.csv")
    self.assertEqual((status, out), (2, ""))
    self.assertIn("--per-class", err)
    self.assertIn("needs 'vit'", err)

  def test_missing_data_is_one_line(self):
    status, out, err = self._call("--data", "/nope/images")
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn("data.path='/nope/images'", err)


if __name__ == "__main__":
  absltest.main()
