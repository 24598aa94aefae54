import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import RouterConfig
from moh_jax.evaluation import harness
from tests.cli import tiny_checkpoint
from tests.evaluation import tiny_harness
from tests.inference import tiny_text_model

_TEXTS = ("It was the best of times.\n", "caf\u00e9 au lait")
_METRICS = (
  *("bits_per_byte", "perplexity", "word_perplexity", "nats"),
  *("tokens", "words", "bytes", "documents"),
)


class _CommandTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.workdir = cls.root / "run"
    # Two runs of layers: one at an equal top_k.
    config = config_lib.apply_overrides(
      tiny_text_model.CONFIG, "model", top_k=(1, 2)
    )
    tiny_text_model.save(cls.workdir, config)
    for index, text in enumerate(_TEXTS):
      (cls.root / f"{index}.txt").write_text(text)
    cls.texts = str(cls.root / "*.txt")

  def _call(self, *argv):
    return tiny_checkpoint.call(
      "evaluate-lm", "--checkpoint", self.workdir, *argv
    )

  def _report(self, *argv):
    status, out, err = self._call(*argv, "--json", "-")
    self.assertEqual(status, 0, err)
    return json.loads(out)  # one object and nothing else


class EvaluateTextTest(_CommandTest):
  def test_several_shares_equal_runs_of_their_own(self):
    file = self.root / "out.json"
    options = ("--data", self.texts, "--top-k")
    status, out, err = self._call(*options, 1, "--top-k", 3, "--json", file)
    self.assertEqual(status, 0, err)
    report = json.loads(file.read_text())
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
    self.assertEqual(lines[0], "text top_k=1 (50.0%) top_k=3 (100.0%)".split())
    self.assertCountEqual([line[0] for line in lines[1:]], _METRICS)
    bits = [f"{text['bits_per_byte']:.4f}" for text in texts]
    self.assertIn(["bits_per_byte", *bits], lines)

    # Each is made of the same parameters.
    alone = self._report(*options, 3)["runs"]
    self.assertLen(alone, 1)
    np.testing.assert_allclose(
      [alone[0]["text"][name] for name in _METRICS],
      [texts[1][name] for name in _METRICS],
      rtol=1e-6,
    )

  def test_numbers_with_commas_are_of_the_layers_as_in_evaluate(self):
    (run,) = self._report("--data", self.texts, "--top-k", "2,1")["runs"]
    self.assertEqual((run["top_k"], run["activated_share"]), ([2, 1], 0.625))

  @parameterized.parameters(
    ((), "give --tasks, --data or both"),
    (("--data", "/nope/*.txt"), "/nope/*.txt: no such file"),
    (("--data", "x", "--top-k", "1,4"), "top_k=4 must be in [0, 3]"),
    (("--data", "x", "--batch-size", "0"), "size: 0 must be at least 1"),
    (("--data", "x", "--batch-size", "7"), "batch-size=7 must be a multiple"),
    (("--tasks", "a,,b"), "tasks='a,,b' must be names"),
    (("--tasks", "a", "--limit", "0"), "--limit: 0 must be at least 1"),
    (("--tasks", "a", "--num-fewshot", "-1"), "num_fewshot=-1 must be"),
    (("--data", "x", "--step", "3"), "no checkpoint of step 3"),
  )
  def test_what_does_not_fit_is_one_line(self, argv, message):
    argv = [str(self.root / "0.txt") if arg == "x" else arg for arg in argv]
    status, out, err = self._call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)

  def test_missing_lm_eval_is_one_line(self):
    error = ValueError("needs the library 'lm_eval'")
    with mock.patch.object(harness, "import_extra", side_effect=error):
      status, out, err = self._call("--tasks", "paper-small")
    self.assertEqual((status, out), (2, ""))
    self.assertEqual(err, "error: needs the library 'lm_eval'\n")

  def test_model_of_another_family_is_refused(self):
    other = self.root / "vit"
    tiny_checkpoint.save(other)
    status, _, err = tiny_checkpoint.call(
      "evaluate-lm", "--checkpoint", other, "--data", self.texts
    )
    self.assertEqual(status, 2)
    self.assertIn("family 'vit'; `evaluate-lm` needs 'llm'", err)

  def test_model_without_router_has_no_shares(self):
    other = self.root / "mha"
    model = dataclasses.replace(
      tiny_text_model.CONFIG.model, router=RouterConfig("none")
    )
    config = dataclasses.replace(tiny_text_model.CONFIG, model=model)
    tiny_text_model.save(other, config)
    status, _, err = tiny_checkpoint.call(
      *("evaluate-lm", "--checkpoint", other, "--data", self.texts),
      *("--top-k", 1),
    )
    self.assertEqual(status, 2)
    self.assertIn("has no routed heads, model.router.kind='none'", err)


class EvaluateTasksTest(_CommandTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tasks = cls.root / "tasks"
    cls.tasks.mkdir()
    tiny_harness.write_tasks(cls.tasks)

  def test_tasks_of_every_kind_have_rows_and_a_mean(self):
    file = self.root / "out.json"
    status, out, err = self._call(
      *("--tasks", "tiny_choice,tiny_write,tiny_text", "--limit", 2),
      *("--include-path", self.tasks, "--num-fewshot", 1, "--json", file),
    )
    self.assertEqual(status, 0, err)
    lines = [line.split() for line in out.splitlines()]
    self.assertEqual(lines[0], "task shots metric top_k=1,2 (62.5%)".split())
    self.assertCountEqual(
      [line[:3] for line in lines[1:-1]],
      [
        ["tiny_choice", "1", "acc"],
        ["tiny_choice", "1", "acc_norm"],
        ["tiny_write", "1", "exact_match"],
        ["tiny_text", "0", "bits_per_byte"],
        ["tiny_text", "0", "word_perplexity"],
      ],
    )
    self.assertEqual([line[-1] == "*" for line in lines[1:-1]], [0, 1, 1, 0, 0])
    run = json.loads(file.read_text())["runs"][0]
    self.assertEqual(run["activated_share"], 0.625)
    rows = run["tasks"]
    self.assertEqual({row["documents"] for row in rows.values()}, {2})
    main = [
      rows[name]["metrics"][metric]["value"]
      for name, metric in (
        ("tiny_choice", "acc_norm"),
        ("tiny_write", "exact_match"),
      )
    ]
    self.assertAlmostEqual(run["mean"], np.mean(main))
    self.assertEqual(lines[-1], ["mean", "of", "*", f"{np.mean(main):.4f}"])


if __name__ == "__main__":
  absltest.main()
