import json

import chex
import numpy as np
import pytest

from moh_jax import config as config_lib
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import CLASS_NAMES, CONFIG
from tests.data.tiny_images import put
from tests.evaluation import tiny_harness

_TEXTS = ("It was the best of times.\n", "caf\u00e9 au lait")
_BATCH, _EXAMPLES = "--config.eval.batch_size", "--config.eval.examples"


class ClassifierTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "evaluate", "vit"

  @pytest.mark.integration
  def test_several_top_k_are_columns(self):
    out = self.done("--top-k=0", "--top-k=3")
    head, *lines = (line.split() for line in out.splitlines())
    self.assertEqual(head, "metric top_k=0 (25.0%) top_k=3 (100.0%)".split())
    losses = [self.report(f"--top-k={k}")["loss"] for k in (0, 3)]
    self.assertIn(["loss", *(f"{loss:.4f}" for loss in losses)], lines)

  @pytest.mark.integration
  def test_models_of_shards_and_of_folders_read_both(self):
    shards, folder = self.root / "shards", self.root / "plain"
    put(folder, *(f"{n}/{n}{i}.png" for n in CLASS_NAMES for i in range(2)))
    argv = ("--data", folder, "--out", shards, "--split", "val")
    argv += ("--val-share=1",)
    tiny_checkpoint.done("prepare", "pack-images", *argv)
    for source in ("array_record", "image_folder"):
      data = {"source": source, "path": str(shards)}
      stored = config_lib.apply_overrides(CONFIG, "data", **data)
      run = self.root / source
      tiny_checkpoint.save_random(run, stored, CLASS_NAMES)
      for data in (shards, folder):
        found = self.report("--data", data, "--checkpoint", run)
        self.assertEqual(found["examples"], 12)


class TextTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "evaluate", "text"

  def setUp(self):
    super().setUp()
    for index, text in enumerate(_TEXTS):
      (self.root / f"{index}.txt").write_text(text)

  @pytest.mark.integration
  def test_several_top_k_equal_runs_of_their_own(self):
    argv = "--data", self.root / "*.txt"
    one, every = self.report(*argv, "--top-k=1", "--top-k=3")["runs"]
    self.assertEqual([one["top_k"], every["top_k"]], [[1, 1], [3, 3]])
    shares = one["activated_share"], every["activated_share"]
    self.assertEqual(shares, (0.5, 1.0))
    self.assertEqual(every["text"]["documents"], 2)
    nats = (run["text"]["nats"] for run in (one, every))
    self.assertNotAlmostEqual(*nats, places=1)
    # Each is made of the same parameters, and whatever the batches.
    (alone,) = self.report(*argv, "--top-k=3", f"{_BATCH}=16")["runs"]
    chex.assert_trees_all_close(alone["text"], every["text"], rtol=1e-6)

  def test_tasks_have_rows_and_a_mean(self):
    tasks, file = self.root / "tasks", self.root / "out.json"
    tasks.mkdir()
    tiny_harness.write_tasks(tasks)
    out = self.done(
      *("--tasks", "tiny_choice,tiny_write", "--limit", 2),
      *("--include-path", tasks, "--num-fewshot", 1, "--json", file),
    )
    (run,) = json.loads(file.read_text())["runs"]
    rows = run["tasks"].values()
    self.assertEqual({row["documents"] for row in rows}, {2})
    main = [row["metrics"][row["main"]]["value"] for row in rows]
    self.assertAlmostEqual(run["mean"], np.mean(main))
    head, *_, last = out.splitlines()
    self.assertEndsWith(head, "top_k=1,2 (62.5%)")
    self.assertEqual(last.split(), ["mean", "of", "*", f"{run['mean']:.4f}"])
    self.assertRegex(out, r"(?m)^tiny_choice, 1 shots: acc_norm .* \*$")
    self.assertNotRegex(out, r"(?m)^tiny_choice, 1 shots: acc .* \*$")

  def test_a_token_set_is_scored_as_what_a_run_held_out(self):
    tokens = self.root / "tokens"
    tiny_checkpoint.done(
      *("prepare", "tokenize", "--data", self.root / "0.txt"),
      *("--tokenizer=bytes", "--split=val", "--out", tokens),
    )
    found = self.report("--data", tokens, f"{_BATCH}=8")
    self.assertIn("bits_per_byte", found)
    self.assertEqual(found["tokens"], len(_TEXTS[0]) + 1)  # and its end
