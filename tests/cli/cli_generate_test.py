import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax import Generator, Sampling
from tests import two_processes
from tests.cli import tiny_checkpoint
from tests.inference import tiny_text_model, tiny_writer

_TEMPLATE = "{{ messages[-1].content }}"
_ONE = '{"prompt": "aA"}\n'
_TWO = f'{_ONE}{{"prompt": "xX"}}\n'


class _CommandTest(parameterized.TestCase):
  """The model writes the alphabet, "bB" after "aA"; see tiny_writer.py."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.workdir, cls.classifier = root / "llm", root / "vit"
    tiny_writer.save_alphabet(cls.workdir)
    tiny_checkpoint.save(cls.classifier)

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _call(self, *argv, checkpoint=None):
    checkpoint = checkpoint or self.workdir
    return tiny_checkpoint.call("generate", "--checkpoint", checkpoint, *argv)

  def _written(self, *argv, **where):
    status, out, err = self._call(*argv, **where)
    self.assertEqual((status, err), (0, ""))
    return out

  def _assert_refused(self, message, *argv, **where):
    status, out, err = self._call(*argv, **where)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)

  def _interact(self, *lines, argv=("--max-new-tokens", 3), **where):
    with mock.patch("builtins.input", side_effect=[*lines, EOFError]):
      return self._written("--interactive", *argv, **where)


class PromptsTest(_CommandTest):
  def test_one_prompt_is_continued_on_stdout(self):
    out = self._written("--prompt", "aA", "--max-new-tokens", 3)
    self.assertEqual(out, "aAbBcCdD\n")

  def test_several_prompts_say_how_each_ended(self):
    out = self._written(
      *("--prompt", "aA", "--prompt", "xX", "--prompt", "cC"),
      *("--max-new-tokens", 4, "--stop", "Ee"),
      *("--stop", "Fg", "--stop", "Gh"),
    )
    expected = "aAbBcCdDeE\n[length]\n\nxXyYzZ\n[end]\n\ncCdDeEf\n[stop]\n\n"
    self.assertEqual(out, expected)

  def test_json_holds_texts_tokens_and_log_probabilities(self):
    file = self.root / "out.json"
    argv = ("--prompt", "aA", "--prompt", "xX", "--max-new-tokens", 3)
    out = self._written(*argv, "--json", file)
    self.assertEqual(out, "aAbBcCdD\n[length]\n\nxXyYzZ\n[end]\n\n")
    report = json.loads(file.read_text())
    self.assertEqual(json.loads(self._written(*argv, "--json=-")), report)
    self.assertEqual(report["step"], 0)
    first, second = report["completions"]
    self.assertEqual(first["prompt"], "aA")
    self.assertEqual(first["text"], "bBcCdD")
    self.assertEqual(first["tokens"], [2, 3, 4])
    self.assertEqual(first["finish_reason"], "length")
    self.assertLen(first["log_probs"], 3)
    self.assertEqual((second["text"], second["finish_reason"]), ("yYzZ", "end"))

  def test_options_of_sampling_reach_the_tokens(self):
    argv = ("--prompt", "aA", "--max-new-tokens", 3, "--temperature", 50)
    texts = [self._written(*argv, "--seed", seed) for seed in (0, 1)]
    self.assertNotEqual(texts[0], texts[1])
    for best in (("--top-p", 1e-6, "--cache-dtype=int8"), ("--sample-top-k=1")):
      best = [best] if isinstance(best, str) else best
      self.assertEqual(self._written(*argv, *best), "aAbBcCdD\n")

  def test_special_tokens_of_a_prompt_are_parsed_on_request(self):
    # The begin of text after another text is followed by "aA".
    argv = ("--prompt", "zZ<|begin_of_text|>", "--max-new-tokens", 2)
    out = self._written(*argv, "--parse-special", "--no-bos")
    self.assertEqual(out, "zZ<|begin_of_text|>aAbB\n")

  def test_generator_opens_the_checkpoint_and_its_tokenizer(self):
    generator = Generator.from_checkpoint(self.workdir)
    (completion,) = generator.generate(["aA"], Sampling(max_new_tokens=2))
    self.assertEqual(completion.text, "bBcC")

  def test_model_that_writes_no_text_is_refused(self):
    argv = ("--prompt=aA",)
    message = "`generate` needs 'llm'"
    self._assert_refused(message, *argv, checkpoint=self.classifier)
    tiny_writer.save_alphabet(self.root)
    (self.root / "tokenizer.json").unlink()
    message = "holds no tokenizer.json"
    self._assert_refused(message, *argv, checkpoint=self.root)


class FilesTest(_CommandTest):
  def setUp(self):
    super().setUp()
    self.out = self.root / "out.jsonl"
    self.argv = ("--prompt-file", self.root / "in.jsonl", "--out", self.out)
    self.argv += ("--max-new-tokens", 3)
    (self.root / "in.jsonl").write_text(_TWO)

  def _rows(self):
    return [json.loads(row) for row in self.out.read_text().splitlines()]

  def test_prompts_of_a_file_go_to_a_file(self):
    told = f"2 completions in {self.out}"
    self.assertEqual(self._written(*self.argv), f"{told}; 0 were there\n")
    rows = self._rows()
    self.assertEqual([row["index"] for row in rows], [0, 1])
    self.assertEqual([row["text"] for row in rows], ["bBcCdD", "yYzZ"])
    self.assertEqual([row["finish_reason"] for row in rows], ["length", "end"])
    self.assertEqual(self._written(*self.argv), f"{told}; 2 were there\n")
    self._assert_refused("seed: 1 here, 0 there", *self.argv, "--seed=1")

  def test_settings_keep_their_names(self):
    self._written(*self.argv)
    settings = json.loads(
      self.out.with_name("out.jsonl.settings.json").read_text()
    )
    self.assertEqual(
      settings.keys(),
      {
        *("prompts", "checkpoint", "ema", "routed_heads", "gate_form", "dtype"),
        *("cache_dtype", "chat", "system", "chat_template", "no_bos"),
        *("parse_special", "tokenizer", "max_new_tokens", "temperature"),
        *("top_k", "top_p", "stop", "seed"),
      },
    )
    self.assertEqual(settings["ema"], True)
    message = "ema: False here, True there"
    self._assert_refused(message, *self.argv, "--config.eval.use_ema=false")

  def test_a_file_is_of_one_number_of_heads_and_form_of_gates(self):
    tiny_text_model.save(self.root)
    (self.root / "in.jsonl").write_text(_ONE)
    where = {"checkpoint": self.root}
    self._written(*self.argv, "--top-k", 1, **where)
    message = "[3] here, [1] there"
    self._assert_refused(message, *self.argv, "--top-k", 3, **where)
    argv = ("--top-k", 1, "--config.model.router.gate_form=paper")
    message = "gate_form: 'paper' here, None there"
    self._assert_refused(message, *self.argv, *argv, **where)

  def test_two_processes_share_parameters_and_prompts(self):
    (self.root / "in.jsonl").write_text(_TWO * 3)
    first, second = two_processes.call(
      *("-m", "moh_jax", "generate", "--checkpoint", str(self.workdir)),
      *map(str, self.argv),
      *("--batch-size", "2", "--distributed"),
      "--config.mesh.fsdp=4",  # each has half of the parameters
    )
    self.assertIn("6 completions", first)
    self.assertNotIn("completions", second)
    texts = [row["text"] for row in self._rows()]
    self.assertEqual(texts, ["bBcCdD", "yYzZ"] * 3)


class InteractiveTest(_CommandTest):
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


class ChatTest(_CommandTest):
  def _with_template(self, source=_TEMPLATE):
    tiny_writer.save_alphabet(self.root)
    (self.root / "chat_template.jinja").write_text(source)
    return {"checkpoint": self.root}

  def test_prints_the_answers_alone(self):
    where = self._with_template()
    argv = ("--chat", "--max-new-tokens", 3, "--prompt", "aA")
    self.assertEqual(self._written(*argv, **where), "bBcCdD\n")
    out = self._written(*argv, "--prompt", "xX", **where)
    self.assertEqual(out, "bBcCdD\n[length]\n\nyYzZ\n[end]\n\n")

  def test_a_conversation_goes_on_line_by_line(self):
    where = self._with_template("{{ messages[0].content }}")
    argv = ("--chat", "--max-new-tokens", 3)
    out = self._interact("aA", "xX", argv=argv, **where)
    self.assertEqual(out, "bBcCdD\nbBcCdD\n\n")  # the first message is read

  def test_prompts_of_a_file_go_through_the_template(self):
    where = self._with_template(f"{_TEMPLATE}aA")
    (self.root / "in.jsonl").write_text(_TWO)
    out = self.root / "out.jsonl"
    argv = ("--prompt-file", self.root / "in.jsonl", "--out", out)
    self._written(*argv, "--max-new-tokens=3", "--chat", **where)
    rows = out.read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    self.assertEqual(texts, ["bBcCdD", "bBcCdD"])
    argv = (*argv, "--max-new-tokens=3")
    self._assert_refused("chat: False here", *argv, **where)

  def test_system_and_messages_reach_the_template(self):
    every = "{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}"
    where = self._with_template(every)
    messages = [{"role": "C", "content": "c"}]
    (self.root / "messages.json").write_text(json.dumps(messages))
    system = {"role": "system", "content": ""}
    user = {"role": "user", "content": "xX"}
    for argv, expected in (
      (("--messages", self.root / "messages.json"), messages),
      (("--chat", "--system", "", "--prompt", "xX"), [system, user]),
    ):
      out = self._written(*argv, "--json=-", "--max-new-tokens=1", **where)
      (completion,) = json.loads(out)["completions"]
      self.assertEqual(completion["messages"], expected)
      self.assertLen(completion["tokens"], 1)

  def test_template_that_refuses_is_one_line(self):
    where = self._with_template("{{ raise_exception('no users') }}")
    message = "chat_template.jinja refuses the messages: no users"
    self._assert_refused(message, "--chat", "--prompt", "a", **where)


if __name__ == "__main__":
  absltest.main()
