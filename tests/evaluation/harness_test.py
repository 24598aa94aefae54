import math
import pathlib
import sys
import tempfile
from unittest import mock

import chex
import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.evaluation import harness
from moh_jax.evaluation.harness import TaskChoice, choose_tasks, main_metric
from moh_jax.inference.score import Scorer
from moh_jax.models.registry import make_model
from moh_jax.runtime.mesh import make_mesh
from tests.evaluation import tiny_harness
from tests.inference import tiny_text_model

_UNIFORM = math.log(256)  # nats of a token


class HarnessTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    from moh_jax.evaluation.harness_model import HarnessModel

    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    tiny_harness.write_tasks(cls.folder)
    config = tiny_text_model.CONFIG
    cls.scorer = Scorer(
      make_model(config)[0],
      tiny_text_model.params(),
      config.model,
      batch_size=8,
      mesh=make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    cls.prompts = []

    def generate(prompts, **options):
      cls.prompts += [bytes(p[1:]).decode() for p in prompts]
      return ["4\nQ" for _ in prompts]

    cls.model = HarnessModel(BytesTokenizer(), cls.scorer, generate)

  def _load(self, names, shots=None):
    """Opens tasks; the harness's own ones would take seconds to read."""
    from lm_eval.tasks import manager

    files = sorted(pathlib.Path(self.folder).glob("*.yaml"))
    with mock.patch.object(
      manager.TaskIndex, "_iter_yaml_files", lambda root: files
    ):
      return harness.open_tasks(choose_tasks(names, shots), self.folder)

  def test_choices_are_scored_by_their_probabilities(self):
    right, normalized = [], []
    for row in tiny_harness.CHOICES:
      # The task's delimiter, a space, stands before each choice.
      question, context = row["question"], row["question"].rstrip().encode()
      texts = [f"{question} {choice}".encode() for choice in row["choices"]]
      pairs = [([256, *context], [*text[len(context) :]]) for text in texts]
      found = self.scorer.log_likelihoods(pairs)
      scores = [one.log_likelihood for one in found]
      per_byte = [x / len(c) for x, c in zip(scores, row["choices"])]
      right.append(np.argmax(scores) == row["answer"])
      normalized.append(np.argmax(per_byte) == row["answer"])
    report = harness.run_tasks(self._load("tiny_choice"), self.model)
    row = report["tasks"]["tiny_choice"]
    metrics = row["metrics"]
    self.assertAlmostEqual(metrics["acc"]["value"], np.mean(right))
    self.assertAlmostEqual(metrics["acc_norm"]["value"], np.mean(normalized))
    stderr = np.std(right, ddof=1) / len(right) ** 0.5
    self.assertAlmostEqual(metrics["acc"]["stderr"], stderr)
    self.assertEqual((row["main"], row["documents"]), ("acc_norm", 5))

  def test_written_answers_are_compared(self):
    self.prompts.clear()
    loaded = self._load("tiny_write", 2)
    report = harness.run_tasks(loaded, self.model, limit=1)
    self.assertEqual(report["mean"], 1.0)
    self.assertEqual(report["tasks"]["tiny_write"]["shots"], 2)
    self.assertEqual(self.prompts, ["1+1= 2\n\n3+1= 4\n\n2+2="])

  def test_tasks_can_run_again_with_the_same_metrics(self):
    loaded = self._load("tiny_choice,tiny_text", 1)
    with mock.patch.object(sys, "stdout") as out:
      first = harness.run_tasks(loaded, self.model)
    out.write.assert_not_called()
    self.assertEqual(harness.run_tasks(loaded, self.model), first)
    text = first["tasks"]["tiny_text"]
    self.assertFalse(text["metrics"]["bits_per_byte"]["higher_is_better"])
    self.assertEqual(text["main"], "")  # a perplexity has no place in a mean
    choice = first["tasks"]["tiny_choice"]["metrics"]["acc_norm"]["value"]
    self.assertEqual(first["mean"], choice)

  def test_group_has_one_row(self):
    loaded = self._load("tiny_group", 1)
    report = harness.run_tasks(loaded, self.model, limit=3)
    self.assertEqual(list(report["tasks"]), ["tiny_group"])
    row = report["tasks"]["tiny_group"]
    self.assertEqual(row["documents"], 6)
    self.assertEqual(report["mean"], row["metrics"]["acc"]["value"])

  @parameterized.parameters(
    ("tiny_chioce", "'tiny_chioce' is none .* did you mean 'tiny_choice'"),
    ("tiny_lost", "task 'tiny_lost' cannot be loaded: .*nope.jsonl"),
  )
  def test_task_that_cannot_run_is_named(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      self._load(name)


class TasksTest(parameterized.TestCase):
  def test_presets_and_names_give_their_tasks(self):
    chosen = choose_tasks("paper-small, mmlu,arc_easy")
    self.assertEqual(
      [choice.name for choice in chosen],
      [c.name for c in harness.PRESETS["paper-small"]] + ["mmlu", "arc_easy"],
    )
    self.assertEqual(chosen[0], TaskChoice("sciq", 0, "acc_norm"))
    self.assertEqual(chosen[-2], TaskChoice("mmlu"))
    shots = {choice.shots for choice in choose_tasks("paper-llama3", 3)}
    self.assertEqual(shots, {3})

  @parameterized.parameters(
    ("acc", ["acc", "acc_norm"], "acc"),
    ("", ["acc", "acc_norm"], "acc_norm"),
    ("nope", ["f1", "em,none"], "em,none"),
    ("", ["exact_match,b", "exact_match,a"], "exact_match,b"),
    ("", ["word_perplexity"], ""),
  )
  def test_metric_that_counts(self, wanted, metrics, expected):
    self.assertEqual(main_metric(wanted, metrics), expected)


class DocumentsTest(parameterized.TestCase):
  """A scorer that finds every one of 256 tokens as likely."""

  def _score(self, texts, tokenizer=None, nats=_UNIFORM):
    self.scorer = tiny_harness.CountingScorer(nats)
    tokenizer = tokenizer or BytesTokenizer()
    return harness.score_documents(self.scorer, tokenizer, texts)

  def test_counts_and_metrics_are_those_of_all_documents(self):
    metrics = self._score(["one two\n", "caf\u00e9", ""])
    expected = {"nats": 13 * _UNIFORM, "perplexity": 256}
    expected |= {"bits_per_byte": 8, "word_perplexity": 256 ** (13 / 3)}
    expected |= {"tokens": 13, "bytes": 13, "words": 3, "documents": 3}
    chex.assert_trees_all_close(metrics, expected, rtol=1e-7)
    self.assertEqual(self._score(["a"], nats=1e6)["perplexity"], math.inf)

  def test_long_text_is_scored_in_parts(self):
    metrics = self._score(["ab" * 5000, "gh", "ij"])
    self.assertEqual([len(call) for call in self.scorer.calls], [5000, 2])
    self.assertAlmostEqual(metrics["nats"], 10004 * _UNIFORM, places=3)

  def test_what_has_no_score_is_refused(self):
    for texts in ([], [""], [" \n"]):
      with self.assertRaisesRegex(ValueError, "the text to score is empty"):
        self._score(texts)
    tokenizer = BytesTokenizer()
    tokenizer.bos_id = tokenizer.eos_id = None
    with self.assertRaisesRegex(ValueError, "neither begin nor end of text"):
      self._score(["a"], tokenizer)
