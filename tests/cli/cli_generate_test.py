import json
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax import Generator, Sampling
from tests import two_processes
from tests.cli import tiny_checkpoint
from tests.inference import tiny_text_model, tiny_writer


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

  def test_prompts_of_a_file_go_to_a_file(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (root / "in.jsonl").write_text('{"prompt": "aA"}\n{"prompt": "xX"}\n')
    argv = ("--prompt-file", root / "in.jsonl", "--out", root / "out.jsonl")
    argv += ("--max-new-tokens", 3)
    status, out, err = self._call(*argv)
    self.assertEqual((status, err), (0, ""))
    told = f"2 completions in {root}/out.jsonl"
    self.assertEqual(out, f"{told}; 0 were there\n")
    rows = [
      json.loads(row) for row in (root / "out.jsonl").read_text().splitlines()
    ]
    self.assertEqual([row["index"] for row in rows], [0, 1])
    self.assertEqual([row["text"] for row in rows], ["bBcCdD", "yYzZ"])
    self.assertEqual([row["finish_reason"] for row in rows], ["length", "end"])
    _, out, _ = self._call(*argv)
    self.assertEqual(out, f"{told}; 2 were there\n")
    self._assert_refused("seed: 1 here, 0 there", *argv, "--seed=1")

  def test_a_file_of_prompts_is_of_one_number_of_heads(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    tiny_text_model.save(root)
    (root / "in.jsonl").write_text('{"prompt": "aA"}\n')
    argv = ("--prompt-file", root / "in.jsonl", "--out", root / "out.jsonl")
    argv += ("--max-new-tokens", 1, "--top-k")
    self.assertEqual(self._call(*argv, 1, checkpoint=root)[0], 0)
    status, _, err = self._call(*argv, 3, checkpoint=root)
    self.assertEqual(status, 2)
    self.assertIn("[3] here, [1] there", err)

  def test_a_file_goes_on_with_the_same_model_wherever_it_is(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (root / "in.jsonl").write_text('{"prompt": "aA"}\n{"prompt": "xX"}\n')
    out = root / "out.jsonl"
    argv = ("--prompt-file", root / "in.jsonl", "--out", out)
    argv += ("--max-new-tokens", 3)
    model = root / "model"
    tiny_writer.save_alphabet(model)
    self.assertEqual(self._call(*argv, checkpoint=model)[0], 0)
    whole = out.read_bytes()
    shutil.copytree(model, root / "copy")
    tiny_writer.save_alphabet(root / "again")  # other files, the same content
    for place in ("copy", "again"):
      out.write_bytes(whole[: whole.index(b"\n") + 1])
      status, told, err = self._call(*argv, checkpoint=root / place)
      self.assertEqual((status, err), (0, ""))
      self.assertIn("1 were there", told)
      self.assertEqual(out.read_bytes(), whole)
    # Other weights, and another end of texts, in the same folder.
    (model / "generation_config.json").write_text('{"eos_token_id": [3]}')
    self._assert_refused("tokenizer: '", *argv, checkpoint=model)
    shutil.rmtree(model)
    params = tiny_writer.alphabet_params()
    params["head"]["kernel"][5, 7] = 0.1
    with mock.patch.object(tiny_writer, "alphabet_params", lambda: params):
      tiny_writer.save_alphabet(model)
    self._assert_refused("checkpoint: '", *argv, checkpoint=model)
    self.assertEqual(out.read_bytes(), whole)

  def test_two_processes_share_a_file_of_prompts(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (root / "in.jsonl").write_text('{"prompt": "aA"}\n{"prompt": "xX"}\n' * 3)
    first, second = two_processes.call(
      *("-m", "moh_jax", "generate", "--checkpoint", str(self.workdir)),
      *("--prompt-file", str(root / "in.jsonl")),
      *("--out", str(root / "out.jsonl")),
      *("--max-new-tokens", "3", "--batch-size", "2", "--distributed"),
    )
    self.assertIn("6 completions", first)
    self.assertNotIn("completions", second)
    texts = [
      json.loads(row)["text"]
      for row in (root / "out.jsonl").read_text().splitlines()
    ]
    self.assertEqual(texts, ["bBcCdD", "yYzZ"] * 3)

  def _interact(self, *lines, argv=("--max-new-tokens", 3), **where):
    with mock.patch("builtins.input", side_effect=[*lines, EOFError]):
      status, out, err = self._call("--interactive", *argv, **where)
    self.assertEqual((status, err), (0, ""))
    return out

  def test_lines_are_answered_until_the_end_of_the_input(self):
    out = self._interact("aA", "", "xX", "aA" * 99, "cC")
    first, second, third, fourth, *rest = out.split("\n")
    self.assertEqual((first, second, fourth), ("bBcCdD", "yYzZ", "dDeEfF"))
    self.assertStartsWith(third, "error: prompt 0 has 100 tokens")
    self.assertEqual(rest, ["", ""])

  def test_an_interrupt_ends_one_answer(self):
    stream = Generator.stream
    calls = []

    def interrupted(generator, prompt, sampling):
      calls.append((prompt, sampling.seed))
      pieces = stream(generator, prompt, sampling)
      yield next(pieces)
      if prompt == "aA":
        raise KeyboardInterrupt
      yield from pieces

    with mock.patch.object(Generator, "stream", interrupted):
      out = self._interact("aA", KeyboardInterrupt, "bB")
    self.assertEqual(out, "bB\n\ncCdDeE\n\n")
    self.assertEqual(calls, [("aA", 0), ("bB", 1)])

  @parameterized.parameters(
    (("--prompt-file", "x"), "--prompt-file needs --out FILE"),
    (("--prompt=a", "--out=b"), "--out is of --prompt-file"),
    (("--interactive", "--json=-"), "--json is of --prompt and"),
    (("--interactive", "--distributed"), "--distributed needs --prompt"),
    (("--prompt-file=no.jsonl", "--out=b"), "no.jsonl: no such file"),
    (("--prompt-file=a", "--out=/no/b"), "no directory /no"),
  )
  def test_options_that_do_not_go_together(self, argv, message):
    self._assert_refused(message, *argv)

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

  def _with_template(self, source="{{ messages[-1].content }}"):
    root = self.enterContext(tempfile.TemporaryDirectory())
    tiny_writer.save_alphabet(root)
    (pathlib.Path(root) / "chat_template.jinja").write_text(source)
    return pathlib.Path(root)

  def test_chat_prints_the_answers_alone(self):
    root = self._with_template()
    for prompts, expected in (
      (("aA",), "bBcCdD\n"),
      (("aA", "xX"), "bBcCdD\n[length]\n\nyYzZ\n[end]\n\n"),
    ):
      argv = [word for text in prompts for word in ("--prompt", text)]
      status, out, err = self._call(
        *("--chat", "--max-new-tokens", 3, *argv), checkpoint=root
      )
      self.assertEqual((status, out), (0, expected), err)

  def test_a_conversation_goes_on_line_by_line(self):
    root = self._with_template("{{ messages[0].content }}")
    out = self._interact(
      "aA", "xX", argv=("--chat", "--max-new-tokens", 3), checkpoint=root
    )
    self.assertEqual(out, "bBcCdD\nbBcCdD\n\n")  # the first message is read

  def test_prompts_of_a_file_go_through_the_template(self):
    root = self._with_template("{{ messages[-1].content }}aA")
    (root / "in.jsonl").write_text('{"prompt": "xX"}\n{"prompt": "bB"}\n')
    files = ("--prompt-file", root / "in.jsonl", "--out", root / "out.jsonl")
    argv = (*files, "--max-new-tokens", 3, "--chat")
    status, _, err = self._call(*argv, checkpoint=root)
    self.assertEqual(status, 0, err)
    rows = (root / "out.jsonl").read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    self.assertEqual(texts, ["bBcCdD", "bBcCdD"])
    self._assert_refused("chat: False here", *argv[:-1], checkpoint=root)

  def test_system_and_messages_reach_the_template(self):
    every = "{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}"
    root = self._with_template(every)
    messages = [{"role": "C", "content": "c"}]
    (root / "messages.json").write_text(json.dumps(messages))
    for argv, expected in (
      (("--messages", root / "messages.json"), messages),
      (
        ("--chat", "--system", "", "--prompt", "xX"),
        [
          {"role": "system", "content": ""},
          {"role": "user", "content": "xX"},
        ],
      ),
    ):
      status, out, err = self._call(
        *argv, "--json=-", "--max-new-tokens", 1, checkpoint=root
      )
      self.assertEqual(status, 0, err)
      (completion,) = json.loads(out)["completions"]
      self.assertEqual(completion["messages"], expected)
      self.assertLen(completion["tokens"], 1)

  def test_special_tokens_of_a_prompt_are_parsed_on_request(self):
    # The begin of text after another text is followed by "aA".
    argv = ("--prompt", "zZ<|begin_of_text|>", "--max-new-tokens", 2)
    _, out, _ = self._call(*argv, "--parse-special", "--no-bos")
    self.assertEqual(out, "zZ<|begin_of_text|>aAbB\n")

  @parameterized.parameters(
    (("--system", "a", "--prompt", "a"), "--system 'a' needs --chat"),
    (("--chat-template", "a", "--prompt", "a"), "--chat-template 'a' needs"),
    (("--chat", "--no-bos", "--prompt", "a"), "--no-bos is of plain prompts"),
    (("--chat", "--prompt", "a"), "the model has no chat template"),
    (("--messages", "nowhere.json"), "--messages nowhere.json: no such file"),
    (("--messages", __file__), "Expecting value"),
  )
  def test_bad_chat_is_one_line_that_names_it(self, argv, message):
    self._assert_refused(message, *argv)

  def test_template_that_refuses_is_one_line(self):
    root = self._with_template("{{ raise_exception('no users') }}")
    self._assert_refused(
      "chat_template.jinja refuses the messages: no users",
      *("--chat", "--prompt", "a"),
      checkpoint=root,
    )

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
