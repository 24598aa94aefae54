import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from moh_jax import Generator, Sampling
from tests import two_processes
from tests.cli import tiny_checkpoint
from tests.inference import tiny_writer


class GenerateCommandTest(parameterized.TestCase):
  """The model writes the alphabet, "bB" after "aA"; see tiny_writer.py."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.workdir, cls.classifier = root / "llm", root / "vit"
    tiny_writer.save_alphabet(cls.workdir)
    tiny_checkpoint.save(cls.classifier)

  def _call(self, *argv, checkpoint=None):
    return tiny_checkpoint.call(
      "generate", "--checkpoint", checkpoint or self.workdir, *argv
    )

  def test_one_prompt_is_continued_on_stdout(self):
    status, out, err = self._call("--prompt", "aA", "--max-new-tokens", 3)
    self.assertEqual((status, out), (0, "aAbBcCdD\n"), err)

  def test_two_processes_share_the_work_and_the_first_prints(self):
    first, second = two_processes.call(
      *("-m", "moh_jax", "generate", "--checkpoint", str(self.workdir)),
      *("--prompt", "aA", "--max-new-tokens", "3", "--distributed"),
      *("--mesh", "fsdp=4"),  # each has half of the parameters
    )
    self.assertIn("aAbBcCdD\n", first)
    self.assertNotIn("aA", second)

  def test_several_prompts_say_how_each_ended(self):
    status, out, err = self._call(
      *("--prompt", "aA", "--prompt", "xX", "--prompt", "cC"),
      *("--max-new-tokens", 4, "--stop", "Ee"),
      *("--stop", "Fg", "--stop", "Gh"),
    )
    self.assertEqual(status, 0, err)
    expected = "aAbBcCdDeE\n[length]\n\nxXyYzZ\n[end]\n\ncCdDeEf\n[stop]\n\n"
    self.assertEqual(out, expected)

  def test_json_holds_texts_tokens_and_log_probabilities(self):
    status, out, err = self._call(
      *("--prompt", "aA", "--prompt", "xX", "--max-new-tokens", 3, "--json=-")
    )
    self.assertEqual(status, 0, err)
    report = json.loads(out)
    self.assertEqual(report["step"], 0)
    first, second = report["completions"]
    self.assertEqual(first["prompt"], "aA")
    self.assertEqual(first["text"], "bBcCdD")
    self.assertEqual(first["tokens"], [2, 3, 4])
    self.assertEqual(first["finish_reason"], "length")
    self.assertLen(first["log_probs"], 3)
    self.assertEqual((second["text"], second["finish_reason"]), ("yYzZ", "end"))

  def test_json_file_leaves_the_text_on_stdout(self):
    with tempfile.TemporaryDirectory() as root:
      file = pathlib.Path(root) / "out.json"
      status, out, err = self._call(
        *("--prompt", "aA", "--max-new-tokens", 3, "--json", file)
      )
      self.assertEqual((status, out), (0, "aAbBcCdD\n[length]\n\n"), err)
      (completion,) = json.loads(file.read_text())["completions"]
    self.assertEqual(completion["text"], "bBcCdD")

  def test_options_of_drawing_reach_the_tokens(self):
    argv = ("--prompt", "aA", "--max-new-tokens", 3, "--temperature", 50)
    texts = [self._call(*argv, "--seed", seed)[1] for seed in (0, 1)]
    self.assertNotEqual(texts[0], texts[1])
    _, best, _ = self._call(*argv, "--top-p", 1e-6, "--cache-dtype", "int8")
    self.assertEqual(best, "aAbBcCdD\n")

  @parameterized.parameters(
    (("--max-new-tokens", 0), "max_new_tokens=0 must be at least 1"),
    (("--max-new-tokens", 99), "prompt 0 has 2 tokens; with max_new_tokens=99"),
    (("--temperature", -1), "temperature=-1.0 must be at least 0"),
    (("--top-p", 0), "top_p=0.0 must be in (0, 1]"),
    (("--sample-top-k", -1), "top_k=-1 must be at least 0"),
    (("--stop", ""), "stop='' must not be empty"),
    (("--seed", -1), "seed=-1 must be in"),
    (("--batch-size", 0), "batch_size=0 must be at least 1"),
    (("--step", 7), "no checkpoint of step 7; it has [0]"),
    (("--top-k", "9,9"), "top_k=(9, 9): the model has no routed heads"),
  )
  def test_bad_value_is_one_line_that_names_it(self, argv, message):
    option, value = argv
    self._assert_refused(message, "--prompt", "aA", f"{option}={value}")

  def test_generator_opens_the_checkpoint_and_its_tokenizer(self):
    generator = Generator.from_checkpoint(self.workdir)
    (completion,) = generator.generate(["aA"], Sampling(max_new_tokens=2))
    self.assertEqual(completion.text, "bBcC")

  def test_model_that_writes_no_text_is_refused(self):
    self._assert_refused(
      "`generate` needs 'llm'",
      "--prompt=aA",
      checkpoint=self.classifier,
    )

  def test_missing_tokenizer_is_asked_for(self):
    with tempfile.TemporaryDirectory() as root:
      tiny_writer.save_alphabet(root)
      (pathlib.Path(root) / "tokenizer.json").unlink()
      self._assert_refused(
        "holds no tokenizer.json", "--prompt=aA", checkpoint=root
      )

  @parameterized.parameters(
    ((), "--prompt"),
    (("--prompt", "a", "--cache-dtype", "int4"), "invalid choice: 'int4'"),
    (("--prompt", "a", "--dtype", "float64"), "invalid choice: 'float64'"),
  )
  def test_wrong_use_says_what_is_allowed(self, argv, message):
    status, out, err = self._call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertIn(message, err.splitlines()[-1])

  def _assert_refused(self, message, *argv, checkpoint=None):
    status, out, err = self._call(*argv, checkpoint=checkpoint)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
