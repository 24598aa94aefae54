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

from moh_jax.config import apply_overrides
from moh_jax.convert.checkpoints import export
from moh_jax.data.tokenizers import JsonTokenizer, train_bpe
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.evaluation import tiny_harness
from tests.inference import tiny_text_model

pytestmark = pytest.mark.transformers

_VOCABULARY = 300


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

  @parameterized.parameters(
    ("tiny_choice", True, ()),
    ("tiny_choice", False, ("--no-bos",)),
    ("tiny_text", False, ()),  # the harness adds the begin of text by itself
  )
  def test_scores_are_equal(self, task, add_bos, argv):
    theirs = self._theirs(task, add_bos)[task]
    out = tiny_checkpoint.done(
      *("evaluate", "--checkpoint", self.root / "run", "--json=-"),
      *("--include-path", self.root / "tasks", "--tasks", task, *argv),
    )
    found = json.loads(out)["runs"][0]["tasks"][task]
    for name, metric in found["metrics"].items():
      want = theirs[f"{name},none"]
      self.assertAlmostEqual(metric["value"] / (want or 1), bool(want), 5)
