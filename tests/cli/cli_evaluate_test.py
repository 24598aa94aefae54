import csv
import json

import numpy as np
from PIL import Image

from moh_jax import config as config_lib
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import CLASS_NAMES, CONFIG
from tests.evaluation import tiny_harness

_TEXTS = ("It was the best of times.\n", "caf\u00e9 au lait")
_BATCH, _EXAMPLES = "--config.eval.batch_size", "--config.eval.examples"


class ClassifierTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "evaluate", "vit"

  def _folder(self):
    """Twelve images, of the first four classes."""
    root = self.root / "plain"
    for i, name in enumerate(CLASS_NAMES[:4]):
      (root / name).mkdir(parents=True)
      for j in range(3):
        pixels = np.full((9, 9, 3), 40 * i + j, np.uint8)
        Image.fromarray(pixels).save(root / name / f"{name}{j}.png")
    return root

  def test_prints_a_line_per_metric(self):
    out = self.done("--config.model.router.top_p=1e-6")
    self.assertRegex(out, r"(?m)^accuracy: 0\.\d{4}$")
    self.assertRegex(out, r"(?m)^activated_share: 0\.5000$")
    self.assertRegex(out, r"(?m)^examples: 20$")
    self.assertRegex(out, r"(?m)^step: 0$")

  def test_keys_of_the_config_are_changed(self):
    some, paper = (
      self.report(f"{_EXAMPLES}=6", *change)
      for change in ((), ["--config.model.router.gate_form=paper"])
    )
    self.assertEqual((some["examples"], paper["examples"]), (6, 6))
    self.assertNotAlmostEqual(some["loss"], paper["loss"], places=6)

  def test_several_top_k_are_columns_and_a_plot(self):
    file, plot = self.root / "out.json", self.root / "dial.svg"
    argv = ("--top-k=0", "--top-k=3")
    out = self.done(*argv, "--plot", plot, "--json", file)
    self.assertIn("<svg", plot.read_text())
    runs = json.loads(file.read_text())["runs"]
    self.assertEqual([run["top_k"] for run in runs], [[0], [3]])
    self.assertEqual([run["activated_share"] for run in runs], [0.25, 1.0])
    for run, argument in zip(runs, argv):
      alone = self.report(argument)
      for name in ("accuracy", "loss", "activated_share"):
        self.assertEqual(run[name], alone[name], name)
    lines = [line.split() for line in out.splitlines()]
    self.assertEqual(
      lines[0], "metric top_k=0 (25.0%) top_k=3 (100.0%)".split()
    )
    losses = [f"{run['loss']:.4f}" for run in runs]
    self.assertIn(["loss", *losses], lines)

  def test_models_of_shards_and_of_folders_read_both(self):
    shards, folder = self.root / "shards", self._folder()
    argv = ("--data", folder, "--out", shards, "--split", "val")
    tiny_checkpoint.done("prepare", "pack-images", *argv)
    for source in ("array_record", "image_folder"):
      stored = config_lib.apply_overrides(CONFIG, "model", num_classes=4)
      data = {"source": source, "path": str(shards)}
      stored = config_lib.apply_overrides(stored, "data", **data)
      run = self.root / source
      tiny_checkpoint.save_random(run, stored, CLASS_NAMES[:4])
      for data in (shards, folder):
        found = self.report("--data", data, "--checkpoint", run)
        self.assertEqual(found["examples"], 12)

  def test_scores_of_every_class_and_labels_of_a_file(self):
    target, data = self.root / "classes.csv", ("--data", self._folder())
    plain = self.report(*data)
    self.assertEqual(plain["examples"], 12)
    out = self.done(*data, "--per-class", target, f"{_BATCH}=16")
    with open(target, newline="") as file:
      rows = list(csv.DictReader(file))
    names = [row["class"] for row in rows]
    self.assertEqual(names, list(CLASS_NAMES))
    counts = [int(row["examples"]) for row in rows]
    self.assertEqual(counts, [3] * 4 + [0] * 2)
    right = sum(3 * float(row["accuracy"] or 0) for row in rows)
    self.assertAlmostEqual(right / 12, plain["accuracy"], places=6)
    for name in ("accuracy", "loss"):
      self.assertIn(f"{name}: {plain[name]:.4f}", out)
    self.assertIn("examples: 12\n", out)
    file = self.root / "labels.json"
    file.write_text(json.dumps([[]] * 11 + [list(range(6))]))
    found = self.report(*data, "--labels", file)
    self.assertEqual((found["examples"], found["accuracy"]), (1, 1.0))


class DiffusionTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "evaluate", "dit"

  def test_prints_the_losses_on_the_held_out_split(self):
    out = self.done("--top-k", "0,2")
    metrics = dict(line.split(": ") for line in out.splitlines())
    self.assertEqual(
      metrics.keys(),
      {"loss", "mse", "vb", "activated_share", "examples", "step"},
    )
    self.assertEqual(metrics["examples"], "359")
    loss, mse, bound = (float(metrics[n]) for n in ("loss", "mse", "vb"))
    self.assertAlmostEqual(loss, mse + bound, delta=2e-4)
    share = float(metrics["activated_share"])
    self.assertAlmostEqual(share, (1 + 4) / (2 + 4), delta=1e-4)

  def test_share_of_the_heads_counts_no_padding(self):
    argv = (f"{_EXAMPLES}=119", "--config.model.router.top_p=0.6")
    shares = [
      self.report(*argv, f"{_BATCH}={size}")["activated_share"]
      for size in (8, 120)
    ]
    self.assertAlmostEqual(*shares, places=6)


class TextTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "evaluate", "text"

  def setUp(self):
    super().setUp()
    for index, text in enumerate(_TEXTS):
      (self.root / f"{index}.txt").write_text(text)

  def test_several_top_k_equal_runs_of_their_own(self):
    file = self.root / "out.json"
    argv = "--data", self.root / "*.txt"
    out = self.done(*argv, "--top-k=1", "--top-k=3", "--json", file)
    report = json.loads(file.read_text())
    self.assertEqual(
      report.keys(), {"checkpoint", "step", "dtype", "gate_form", "runs"}
    )
    self.assertEqual((report["step"], report["dtype"]), (0, "float32"))
    runs = report["runs"]
    self.assertEqual([run["top_k"] for run in runs], [[1, 1], [3, 3]])
    self.assertEqual([run["activated_share"] for run in runs], [0.5, 1.0])
    texts = [run["text"] for run in runs]
    self.assertNotAlmostEqual(texts[0]["nats"], texts[1]["nats"], places=1)
    size = sum(len(text.encode()) for text in _TEXTS)
    self.assertEqual({text["bytes"] for text in texts}, {size})
    self.assertEqual({text["documents"] for text in texts}, {2})
    head, *lines = (line.split() for line in out.splitlines())
    self.assertEqual(head, "metric top_k=1 (50.0%) top_k=3 (100.0%)".split())
    self.assertCountEqual([line[0] for line in lines], texts[0])
    bits = [f"{text['bits_per_byte']:.4f}" for text in texts]
    self.assertIn(["bits_per_byte", *bits], lines)
    # Each is made of the same parameters, and whatever the batches.
    (alone,) = self.report(*argv, "--top-k=3", f"{_BATCH}=16")["runs"]
    np.testing.assert_allclose(
      [alone["text"][name] for name in texts[1]],
      list(texts[1].values()),
      rtol=1e-6,
    )

  def test_a_token_set_is_scored_as_what_a_run_held_out(self):
    tokens = self.root / "tokens"
    tiny_checkpoint.done(
      *("prepare", "tokenize", "--data", self.root / "0.txt", "--workers=1"),
      *("--tokenizer=bytes", "--split=val", "--out", tokens),
    )
    found = self.report("--data", tokens, f"{_BATCH}=8")
    self.assertIn("bits_per_byte", found)
    self.assertEqual(found["tokens"], len(_TEXTS[0]) + 1)  # and its end

  def test_tasks_of_every_kind_have_rows_and_a_mean(self):
    tasks, file = self.root / "tasks", self.root / "out.json"
    tasks.mkdir()
    tiny_harness.write_tasks(tasks)
    out = self.done(
      *("--tasks", "tiny_choice,tiny_write,tiny_text", "--limit", 2),
      *("--include-path", tasks, "--num-fewshot", 1, "--json", file),
    )
    head, *lines = (line.rsplit("  ", 1) for line in out.splitlines())
    self.assertEqual(head[1], "top_k=1,2 (62.5%)")
    stars = {name.strip(): text.endswith("*") for name, text in lines}
    self.assertEqual(
      stars,
      {
        "tiny_choice, 1 shots: acc": False,
        "tiny_choice, 1 shots: acc_norm": True,
        "tiny_write, 1 shots: exact_match": True,
        "tiny_text, 0 shots: bits_per_byte": False,
        "tiny_text, 0 shots: word_perplexity": False,
        "mean of *": False,
      },
    )
    (run,) = json.loads(file.read_text())["runs"]
    self.assertEqual(run["activated_share"], 0.625)
    rows = run["tasks"]
    self.assertEqual({row["documents"] for row in rows.values()}, {2})
    main = [
      rows[name]["metrics"][rows[name]["main"]]["value"]
      for name in ("tiny_choice", "tiny_write")
    ]
    self.assertAlmostEqual(run["mean"], np.mean(main))
    self.assertEqual(dict(lines)["mean of *".ljust(35)], f"{run['mean']:.4f}")
