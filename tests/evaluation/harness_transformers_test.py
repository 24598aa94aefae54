"""The harness's own model of transformers on an exported checkpoint.

`pytest -m transformers`: MOH_JAX_TRANSFORMERS_PYTHON names a Python with
PyTorch, transformers and lm-eval.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from absl.testing import parameterized

from moh_jax import Generator, Sampling
from moh_jax.config import apply_overrides
from moh_jax.convert.checkpoints import export
from moh_jax.data.tokenizers import JsonTokenizer, train_bpe
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.evaluation import tiny_harness
from tests.inference import tiny_text_model

pytestmark = pytest.mark.transformers

_VOCABULARY = 300
_TASKS = "tiny_choice,tiny_write"
_ROLLING = "tiny_text"


class HarnessTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    """Exports a model with a tokenizer, and writes the tasks."""
    super().setUpClass()
    root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.root = pathlib.Path(root)
    texts = [json.dumps(row) for row in tiny_harness.CHOICES]
    content = train_bpe(texts * 3, _VOCABULARY)
    tokenizer = JsonTokenizer(content)
    config = apply_overrides(
      tiny_text_model.CONFIG, "model", vocab_size=_VOCABULARY, max_length=128
    )
    checkpoint.save_params(
      cls.root / "run",
      tiny_text_model.params(config),
      checkpoint.Metadata(config, tokenizer_sha256=tokenizer.sha256),
    )
    (cls.root / "run" / "tokenizer.json").write_bytes(content)
    export(str(cls.root / "run"), str(cls.root / "hf"))
    tasks = cls.root / "tasks"
    tasks.mkdir()
    tiny_harness.write_tasks(tasks)
    # Every other answer is what the model writes: half of them match exactly.
    generator = Generator.from_checkpoint(str(cls.root / "run"))
    questions = [row["question"] for row in tiny_harness.CHOICES]
    options = Sampling(max_new_tokens=5, stop=("\n",))
    rows = [
      {"question": question, "choices": [made.text * (i % 2)], "answer": 0}
      for i, (question, made) in enumerate(
        zip(questions, generator.generate(questions, options))
      )
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tasks / "write.jsonl").write_text(lines)
    task = tasks / "tiny_write.yaml"
    task.write_text(task.read_text().replace("choices.jsonl", "write.jsonl"))

  def _theirs(self, tasks, add_bos):
    python = os.environ.get("MOH_JAX_TRANSFORMERS_PYTHON", sys.executable)
    model = (
      f"pretrained={self.root / 'hf'},trust_remote_code=True,dtype=float32,"
      f"add_bos_token={add_bos}"
    )
    out = self.create_tempdir().full_path
    done = subprocess.run(
      [
        *(python, "-m", "lm_eval", "--model", "hf", "--model_args", model),
        *("--include_path", str(self.root / "tasks"), "--tasks", tasks),
        *("--device", "cpu", "--output_path", out),
      ],
      env=os.environ | {"HF_MODULES_CACHE": f"{out}/modules"},
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    (file,) = pathlib.Path(out).rglob("results_*.json")
    return json.loads(file.read_text())["results"]

  def _ours(self, tasks, *argv):
    out = tiny_checkpoint.done(
      *("evaluate", "--checkpoint", self.root / "run", "--json=-"),
      *("--include-path", self.root / "tasks", "--tasks", tasks, *argv),
    )
    return json.loads(out)["runs"][0]["tasks"]

  @parameterized.parameters(
    (_TASKS, True, ()),
    (_TASKS, False, ("--no-bos",)),
    (_ROLLING, False, ()),  # the harness adds the begin of text by itself
  )
  def test_scores_are_equal(self, tasks, add_bos, argv):
    theirs, ours = self._theirs(tasks, add_bos), self._ours(tasks, *argv)
    self.assertEqual(set(ours), set(tasks.split(",")))
    for task, found in ours.items():
      for name, metric in found["metrics"].items():
        want = theirs[task][f"{name},none"]
        self.assertAlmostEqual(metric["value"] / (want or 1), bool(want), 5)
    if add_bos:
      self.assertGreater(
        ours["tiny_write"]["metrics"]["exact_match"]["value"], 0
      )
