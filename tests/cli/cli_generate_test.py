"""`generate`: the model writes the alphabet, "bB" after "aA"."""

import json
from unittest import mock

import pytest
from absl.testing import parameterized

from moh_jax import Generator, Sampling
from tests import two_processes
from tests.cli import tiny_checkpoint
from tests.inference import tiny_writer

_TEMPLATE = "{{ messages[-1].content }}"
_ONE = '{"prompt": "aA"}\n'
_TWO = f'{_ONE}{{"prompt": "xX"}}\n'


class _GenerateTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "generate --max-new-tokens=3", "llm"

  def _files(self, prompts):
    """Options for a file of prompts and one of completions, and the latter."""
    out = self.root / "out.jsonl"
    (self.root / "in.jsonl").write_text(prompts)
    return ("--prompt-file", self.root / "in.jsonl", "--out", out), out

  def _texts(self, out):
    return [json.loads(row)["text"] for row in out.read_text().splitlines()]

  def _interact(self, *lines, argv=()):
    with mock.patch("builtins.input", side_effect=[*lines, EOFError]):
      return self.done("--interactive", *argv)


class PromptsTest(_GenerateTest):
  def test_one_prompt_is_continued_and_several_say_how_each_ended(self):
    self.assertEqual(self.done("--prompt=aA"), "aAbBcCdD\n")
    out = self.done(
      *("--prompt=aA", "--prompt=xX", "--prompt=cC", "--max-new-tokens=4"),
      *("--stop=Ee", "--stop=Fg", "--stop=Gh"),
    )
    expected = "aAbBcCdDeE\n[length]\n\nxXyYzZ\n[end]\n\ncCdDeEf\n[stop]\n\n"
    self.assertEqual(out, expected)

  def test_json_has_all_of_a_text_that_the_options_ask_for(self):
    argv = (
      *("--prompt=aA", "--temperature=50"),
      *("--top-p=0.001", "--seed=3", "--stop=!"),
    )
    with mock.patch.object(
      *(Generator, "generate"), autospec=True, side_effect=Generator.generate
    ) as generate:
      report = self.report(*argv)
    self.assertEqual(report["step"], 0)
    (completion,) = report["completions"]
    self.assertLen(completion.pop("log_probs"), 3)
    expected = {"prompt": "aA", "text": "bBcCdD", "tokens": [2, 3, 4]}
    self.assertEqual(completion, {**expected, "finish_reason": "length"})
    sampling = Sampling(3, temperature=50, top_p=0.001, stop=("!",), seed=3)
    self.assertEqual(generate.call_args.args[2], sampling)


class FilesTest(_GenerateTest):
  def test_prompts_of_a_file_go_to_a_file(self):
    argv, out = self._files(_TWO)
    told = f"2 completions in {out}"
    self.assertEqual(self.done(*argv), f"{told}; 0 were there\n")
    self.assertEqual(self._texts(out), ["bBcCdD", "yYzZ"])
    self.assertEqual(self.done(*argv), f"{told}; 2 were there\n")
    self.assert_refused("seed: 1 here, 0 there", *argv, "--seed=1")

  @pytest.mark.integration
  def test_a_file_is_of_one_model_and_its_heads_and_gates(self):
    argv, _ = self._files(_ONE)
    argv += "--checkpoint", tiny_checkpoint.stored("text")
    self.done(*argv, "--top-k=1")
    self.assert_refused("; model: ", *argv, "--top-k=3")

  @pytest.mark.integration
  def test_two_processes_share_parameters_and_prompts(self):
    argv, out = self._files(_TWO * 3)
    first, second = two_processes.call(
      *("-m", "moh_jax", "generate", "--max-new-tokens=3"),
      f"--checkpoint={tiny_checkpoint.stored('llm')}",
      *map(str, argv),
      *("--distributed", "--config.mesh.fsdp=4"),  # each has half of them
    )
    self.assertIn("6 completions", first)
    self.assertNotIn("completions", second)
    self.assertEqual(self._texts(out), ["bBcCdD", "yYzZ"] * 3)


class InteractiveTest(_GenerateTest):
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


class ChatTest(_GenerateTest):
  def _with_template(self, source):
    tiny_writer.save_alphabet(self.root)
    (self.root / "chat_template.jinja").write_text(source)
    return "--checkpoint", self.root

  def test_answers_are_printed_alone_or_go_to_a_file(self):
    argv = *self._with_template(f"{_TEMPLATE}aA"), "--chat"
    self.assertEqual(self.done(*argv, "--prompt=xX"), "bBcCdD\n")
    files, out = self._files(_TWO)
    self.done(*argv, *files)
    self.assertEqual(self._texts(out), ["bBcCdD"] * 2)

  def test_a_conversation_goes_on_line_by_line(self):
    argv = *self._with_template("{{ messages[0].content }}"), "--chat"
    out = self._interact("aA", "xX", argv=argv)
    self.assertEqual(out, "bBcCdD\nbBcCdD\n\n")  # the first message is read

  def test_system_and_messages_reach_the_template(self):
    every = "{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}"
    where = self._with_template(every)
    messages = [{"role": "C", "content": "c"}]
    (self.root / "messages.json").write_text(json.dumps(messages))
    system = {"role": "system", "content": ""}
    user = {"role": "user", "content": "xX"}
    for argv, expected in (
      (("--messages", self.root / "messages.json"), messages),
      (("--chat", "--system=", "--prompt=xX"), [system, user]),
    ):
      (completion,) = self.report(*argv, *where)["completions"]
      self.assertEqual(completion["messages"], expected)

  def test_tools_reach_the_template(self):
    where = self._with_template(f"{_TEMPLATE}{{{{ tools[0].name if tools }}}}")
    tools, talk = self.root / "tools.json", self.root / "talk.json"
    tools.write_text(json.dumps([{"name": "aA"}]))
    talk.write_text(json.dumps([{"role": "user", "content": "xX"}]))
    for argv in (("--chat", "--prompt=xX"), ("--messages", talk)):
      found = self.done(*argv, "--tools", tools, *where)
      self.assertEqual(found, "bBcCdD\n")
    argv = *where, "--chat", "--tools", tools
    self.assertEqual(self._interact("xX", argv=argv), "bBcCdD\n\n")

  @parameterized.parameters(
    (_TEMPLATE, "does not know 'tools'"),
    ("{{ raise_exception('no ' ~ tools[0].name) }}", "TemplateError: no aA"),
  )
  def test_refusals_of_templates_are_told(self, template, message):
    where, tools = self._with_template(template), self.root / "tools.json"
    tools.write_text(json.dumps([{"name": "aA"}]))
    argv = "--chat", "--prompt=a", "--tools", tools
    self.assert_refused(f"chat_template.jinja: {message}", *argv, *where)
