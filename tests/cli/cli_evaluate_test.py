import csv
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.evaluation import harness
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.evaluation import tiny_harness
from tests.inference import tiny_text_model
from tests.training import tiny

_TEXTS = ("It was the best of times.\n", "caf\u00e9 au lait")
_TOP_P = "--config.model.router.top_p"
_BATCH, _EXAMPLES = "--config.eval.batch_size", "--config.eval.examples"


class _CommandTest(parameterized.TestCase):
  """Calls the command on the checkpoint that `_save` writes."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.root = pathlib.Path(root)
    cls.workdir = cls.root / "run"
    cls._save(cls.workdir)

  def _call(self, *argv, workdir=None):
    workdir = workdir or self.workdir
    return tiny_checkpoint.call("evaluate", "--checkpoint", workdir, *argv)

  def _report(self, *argv, **where):
    status, out, err = self._call(*argv, "--json", "-", **where)
    self.assertEqual(status, 0, err)
    return json.loads(out)  # one object and nothing else

  def _assert_refused(self, message, *argv, **where):
    status, out, err = self._call(*argv, **where)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)


class ClassifierTest(_CommandTest):
  _save = tiny_checkpoint.save

  def test_prints_a_line_per_metric(self):
    status, out, err = self._call()
    self.assertEqual(status, 0, err)
    self.assertRegex(out, r"(?m)^accuracy: 0\.\d{4}$")
    self.assertRegex(out, r"(?m)^examples: 20$")
    self.assertRegex(out, r"(?m)^step: 0$")

  @parameterized.parameters(
    (("--top-k", 0), 0.25),
    (("--top-k", 3), 1.0),
    ((f"{_TOP_P}=1e-6",), 0.5),
    ((f"{_TOP_P}=1",), 1.0),
  )
  def test_served_heads_are_the_activated_share(self, argv, share):
    metrics = self._report(*argv)
    self.assertAlmostEqual(metrics["activated_share"], share, places=5)

  @parameterized.parameters((), ("--per-class", "classes.csv"))
  def test_batches_and_their_padding_change_nothing(self, *argv):
    argv = [part.replace("classes", f"{self.root}/c") for part in argv]
    argv.append(f"{_TOP_P}=0.6")
    ours, theirs = (
      self._report(f"{_BATCH}={size}", *argv)
      for size in (8, 40)  # 20 examples
    )
    self.assertEqual(ours.keys(), theirs.keys())
    for name, value in ours.items():
      self.assertAlmostEqual(value, theirs[name], places=5, msg=name)

  def test_keys_of_the_config_are_changed(self):
    ours = self._report()
    self.assertEqual(ours["examples"], 20)
    some = self._report(f"{_EXAMPLES}=6")
    self.assertEqual(some["examples"], 6)
    paper = self._report("--config.model.router.gate_form=paper")
    self.assertNotAlmostEqual(ours["loss"], paper["loss"], places=6)

  def test_several_top_k_are_columns_and_a_plot(self):
    file, plot = self.root / "out.json", self.root / "dial.svg"
    argv = ("--top-k", "0", "--top-k", "3")
    status, out, err = self._call(*argv, "--plot", plot, "--json", file)
    self.assertEqual(status, 0, err)
    self.assertIn("<svg", plot.read_text())
    found = json.loads(file.read_text())
    self.assertEqual([run["top_k"] for run in found["runs"]], [[0], [3]])
    for run, top_k in zip(found["runs"], (0, 3)):
      alone = self._report("--top-k", top_k)
      for name in ("accuracy", "loss", "activated_share"):
        self.assertEqual(run[name], alone[name], name)
    lines = [line.split() for line in out.splitlines()]
    self.assertEqual(
      lines[0], "metric top_k=0 (25.0%) top_k=3 (100.0%)".split()
    )
    losses = [f"{run['loss']:.4f}" for run in found["runs"]]
    self.assertIn(["loss", *losses], lines)

  def test_models_of_shards_and_of_folders_read_both(self):
    shards, folder = self.root / "shards", self._folder()
    argv = ("--data", folder, "--out", shards, "--split", "val")
    status, _, err = tiny_checkpoint.call("prepare", "pack-images", *argv)
    self.assertEqual(status, 0, err)
    config = config_lib.apply_overrides(
      tiny_checkpoint.CONFIG, "model", num_classes=4
    )
    classes = tiny_checkpoint.CLASS_NAMES[:4]
    for source in ("array_record", "image_folder"):
      of_source = config_lib.apply_overrides(
        config, "data", source=source, path=str(shards)
      )
      workdir = self.root / source
      metadata = checkpoint.Metadata(of_source, classes)
      checkpoint.save_params(workdir, tiny.random_params(of_source), metadata)
      for data in (shards, folder):
        found = self._report("--data", data, workdir=workdir)
        self.assertEqual(found["examples"], 12)

  def _folder(self):
    root = self.root / "plain"
    if not root.exists():
      for i, name in enumerate(tiny_checkpoint.CLASS_NAMES[:4]):
        (root / name).mkdir(parents=True)
        for j in range(3):
          pixels = np.full((9, 9, 3), 40 * i + j, np.uint8)
          Image.fromarray(pixels).save(root / name / f"{name}{j}.png")
    return root

  def test_scores_of_every_class_of_a_folder_of_some(self):
    target = self.root / "classes.csv"
    data = ("--data", self._folder())
    plain = self._report(*data)
    self.assertEqual(plain["examples"], 12)
    status, out, err = self._call(*data, "--per-class", target)
    self.assertEqual(status, 0, err)
    with open(target, newline="") as file:
      rows = list(csv.DictReader(file))
    names = [row["class"] for row in rows]
    self.assertEqual(names, list(tiny_checkpoint.CLASS_NAMES))
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
    for labels, examples in (
      ({name: list(range(6)) for name in names}, 12),
      ([[]] * 11 + [[0]], 1),
    ):
      file.write_text(json.dumps(labels))
      found = self._report("--data", self._folder(), "--labels", file)
      self.assertEqual(found["examples"], examples)
      if examples == 12:  # every class is right
        self.assertEqual(found["accuracy"], 1.0)


class DiffusionTest(_CommandTest):
  _save = tiny_checkpoint.save_dit

  def test_prints_the_losses_on_the_held_out_split(self):
    status, out, err = self._call("--top-k", "0,2")
    self.assertEqual(status, 0, err)
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
    argv = (f"{_EXAMPLES}=119", f"{_TOP_P}=0.6")
    shares = [
      self._report(*argv, f"{_BATCH}={size}")["activated_share"]
      for size in (8, 120)
    ]
    self.assertAlmostEqual(*shares, places=6)


class TextTest(_CommandTest):
  @classmethod
  def _save(cls, workdir):
    # Two runs of layers: one at an equal top_k.
    config = config_lib.apply_overrides(
      tiny_text_model.CONFIG, "model", top_k=(1, 2)
    )
    tiny_text_model.save(workdir, config)
    for index, text in enumerate(_TEXTS):
      (cls.root / f"{index}.txt").write_text(text)
    cls.texts = str(cls.root / "*.txt")

  def test_several_top_k_equal_runs_of_their_own(self):
    file = self.root / "out.json"
    options = ("--data", self.texts, "--top-k")
    status, out, err = self._call(*options, 1, "--top-k", 3, "--json", file)
    self.assertEqual(status, 0, err)
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

    lines = [line.split() for line in out.splitlines()]
    self.assertEqual(
      lines[0], "metric top_k=1 (50.0%) top_k=3 (100.0%)".split()
    )
    self.assertCountEqual([line[0] for line in lines[1:]], texts[0])
    bits = [f"{text['bits_per_byte']:.4f}" for text in texts]
    self.assertIn(["bits_per_byte", *bits], lines)

    # Each is made of the same parameters, and whatever the batches.
    (alone,) = self._report(*options, 3, f"{_BATCH}=16")["runs"]
    np.testing.assert_allclose(
      [alone["text"][name] for name in texts[1]],
      list(texts[1].values()),
      rtol=1e-6,
    )

  def test_a_token_set_is_scored_as_what_a_run_held_out(self):
    tokens = self.root / "tokens"
    status, _, err = tiny_checkpoint.call(
      *("prepare", "tokenize", "--data", self.root / "0.txt", "--workers=1"),
      *("--tokenizer=bytes", "--split=val", "--out", tokens),
    )
    self.assertEqual(status, 0, err)
    found = self._report("--data", tokens, f"{_BATCH}=8")
    self.assertIn("bits_per_byte", found)
    self.assertEqual(found["tokens"], len(_TEXTS[0]) + 1)  # and its end

  def test_tasks_of_every_kind_have_rows_and_a_mean(self):
    tasks, file = self.root / "tasks", self.root / "out.json"
    tasks.mkdir()
    tiny_harness.write_tasks(tasks)
    status, out, err = self._call(
      *("--tasks", "tiny_choice,tiny_write,tiny_text", "--limit", 2),
      *("--include-path", tasks, "--num-fewshot", 1, "--json", file),
    )
    self.assertEqual(status, 0, err)
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

  def test_missing_lm_eval_is_one_line(self):
    error = ValueError("needs the library 'lm_eval'")
    with mock.patch.object(harness, "import_extra", side_effect=error):
      self._assert_refused(str(error), "--tasks", "paper-small")


if __name__ == "__main__":
  absltest.main()
