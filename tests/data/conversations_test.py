"""Conversations: what is trained in them, and how they are packed."""

import dataclasses
import pathlib

import jax
import numpy as np
import tokenizers as hf
from absl.testing import absltest, parameterized

from moh_jax.cli import inspect as inspect_cli
from moh_jax.data import chat, conversations, infer
from moh_jax.data.chat import Template
from moh_jax.data.conversations import (
  ChatSource,
  PreferenceSource,
  best_fit,
  read_pair,
)
from tests.data import tiny_chat
from tests.data.tiny_chat import ask, bot, user
from tests.training import tiny

_RECORDED = pathlib.Path(__file__).parent / "recorded" / "chat"


# Of templates without marks.
_LINES = (
  "{% for m in messages %}{{ 'User ' if m.role == 'user' else 'Bot ' }}"
  "{{ m.content }}END{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}Bot {% endif %}"
)
_ROLES = (
  "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_CALLS = (
  "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0] }}"
  "{% else %}{{ m.content }}{% endif %}<|stop|>{% endfor %}"
)
_EACH = "{% for m in messages %}WHAT<|stop|>{% endfor %}"
_TWO = ask("one", "two")
_TALK = ["one\n", "two\n"]
_AS_PYTHON = "writes the content of message 1 as Python does: "
# Template, messages, answers; None where the template is refused.
_UNMARKED = (
  # Turns that end with nothing, and with a token at the end of the text.
  (_LINES.replace("END", ""), _TWO, _TALK),
  (_LINES.replace("END", "{{ eos_token if loop.last }}"), _TWO, None),
  # The user's turn alone has a stop.
  (_LINES.replace("END", "{{ eos_token if m.role == 'user' }}"), _TWO, _TALK),
  # A stop in the words of a later message ends no answer.
  (_ROLES, ask("one", "two", question="<|stop|>?"), _TALK),
  (_ROLES, ask("one", "two", question="b <|stop|>"), _TALK),
  # An answer may hold its stop.
  (tiny_chat.template("chatml"), ask("one<|stop|>"), ["one<|stop|>"]),
  # The content of an answer that is a call may be nothing.
  (_CALLS, [*ask("None"), bot(None, tool_calls=["f(None)"])],
   ["None<|stop|>", "f(None)<|stop|>"]),
  # Templates that leave turns out, or rewrite them.
  ("{{ messages[-1].content }}", _TWO, None),
  ("{{ messages | length }}" + _EACH.replace("WHAT", "{{ m.content }}"),
   _TWO, None),
  (_EACH.replace("WHAT", "{{ m.content | upper }}"), _TWO, None),
  (_EACH.replace("WHAT", "{{ m.content if m.role == 'user' }}"),
   ask("stop"), None),
)  # fmt: skip


class AnswersTest(parameterized.TestCase):
  @parameterized.parameters(
    *(("llama2", "</s>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")),
    *(("chatml", "<|im_end|>"), ("gemma", "<end_of_turn>")),
  )
  def test_answers_of_public_templates_end_with_their_stop(self, name, stop):
    source = (_RECORDED / f"{name}.jinja").read_text()
    config = {"eos_token": stop, "bos_token": "<|begin_of_text|>"}
    special = (*tiny_chat.SPECIAL, stop)
    tokenizer = tiny_chat.tokenizer(source, special, config)
    text, spans = Template(tokenizer).answers(ask("one", " two\n"))
    shown = ["".join(text[slice(*span)].split()) for span in spans]
    self.assertEqual(shown, [f"one{stop}", f"two{stop}"])

  @parameterized.parameters(*_UNMARKED)
  def test_an_answer_is_what_others_would_change(
    self, source, messages, expected
  ):
    template = Template(tiny_chat.tokenizer(source))
    if expected is None:
      with self.assertRaisesRegex(ValueError, "does not write message 1 as an"):
        template.answers(messages)
    else:
      text, spans = template.answers(messages)
      self.assertEqual([text[slice(*span)] for span in spans], expected)

  _TURN = (
    "({{ m.role }}){% if m.role == 'assistant' %}\n{%- generation %}\n  "
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
  )

  @parameterized.parameters(
    "{% macro f(m) %}TURN{% endmacro %}{% for m in messages %}{{ f(m) }}"
    "{% endfor %}",
    "{% for m in messages %}{% set y %}  TURN{% endset %}{{ y | trim }}"
    "{% endfor %}",
    "{% macro f(m) %}{{ caller() }}{% endmacro %}{% for m in messages %}"
    "{% call f(m) %}TURN{% endcall %}{% endfor %}",
    "{% set y %}{% generation %}zzz{% endgeneration %}{% endset %}"
    "{% for m in messages %}TURN{% endfor %}",
  )
  def test_marks_hold_wherever_they_are_written(self, source):
    template = Template(tiny_chat.tokenizer(source.replace("TURN", self._TURN)))
    text, spans = template.answers(ask("ß one", "two"))
    shown = [text[slice(*span)].strip() for span in spans]
    self.assertEqual(shown, ["ß one", "two"])

  @parameterized.parameters(
    ("y[:30]", "a" * 40, "with a character at each"),
    ("y | length", "one", "with a character at each"),
    ("{{ m.content }}", None, _AS_PYTHON + "None"),
    ("{{ '\\ud83d\\ude00' }}", "one", "surrogates not allowed"),
  )
  def test_what_cannot_be_trained_is_refused(self, what, content, message):
    source = _EACH.replace("WHAT", what)
    if "{{" not in what:
      part = "{% set y %}{% generation %}{{ m.content }}{% endgeneration %}"
      source = _EACH.replace("WHAT", f"{part}{{% endset %}}{{{{ {what} }}}}")
    with self.assertRaisesRegex(ValueError, f"jinja: .*{message}"):
      Template(tiny_chat.tokenizer(source)).answers(ask(content, "two"))

  @parameterized.parameters(True, False)
  def test_tokens_of_spaces_are_in_their_answer(self, trim):
    made = tiny_chat.tokenizer("").parser
    made.post_processor = hf.processors.ByteLevel(trim_offsets=trim)
    encoded = made.encode("a\t\tq  b")
    trained = conversations._in_spans(encoded.offsets, [(0, 3), (4, 6)])
    ids = np.array(encoded.ids)[trained]
    self.assertEqual(made.decode(ids.tolist()), "a\t\t  ")


class BestFitTest(absltest.TestCase):
  def test_each_item_goes_where_it_leaves_least_space(self):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 200)
    expected: list[list[int]] = []
    for index in sorted(range(200), key=lambda i: -sizes[i]):
      spaces = [30 - sizes[one].sum() for one in expected]
      fitting = [s for s in spaces if s >= sizes[index]]
      if fitting:
        expected[spaces.index(min(fitting))].append(index)
      else:
        expected.append([index])
    found = best_fit(sizes, 30)
    self.assertEqual(sorted(np.concatenate(found)), list(range(200)))
    # Bins of the same space are alike, so their contents may differ.
    loads = [sorted(sizes[b].sum() for b in x) for x in (found, expected)]
    self.assertEqual(*loads)


class SourceTest(tiny_chat.ChatTest):
  def test_long_conversations_are_cut_or_skipped(self):
    talks = [ask("one"), ask("one", "b" * 99), ask("c", question="b" * 99)]
    rows = [{"messages": talk} for talk in talks]
    for too_long, expected in (("cut", 2), ("skip", 1)):
      with self.assertLogs(conversations.__name__, "INFO") as logs:
        source = self.open(*rows, sequence_length=60, too_long=too_long)
      self.assertLen(source, expected)
      text = f"2 (data.too_long={too_long}), left out: {3 - expected}"
      self.assertIn(text, logs.output[0])
    with self.assertRaisesRegex(ValueError, "none of 3 conversations has an"):
      self.open(sequence_length=4)

  def test_identity_tells_answers_and_templates_apart(self):
    rows = [{"messages": ask(text)} for text in ("one", "two")]
    first, second = (self.open(row).identity() for row in rows)
    self.assertEqual(self.open(rows[0]).identity(), first)
    self.use("llama3")
    third = self.open(rows[0]).identity()
    self.assertLen({str(one) for one in (first, second, third)}, 3)

  def test_tokenizer_is_that_of_the_checkpoint(self):
    config = tiny.llm_config(
      model={"vocab_size": None}, train={"init_from": str(self.root)}
    )
    data = self.data(tokenizer_path="", sequence_length=16)
    found = infer.resolve(dataclasses.replace(config, data=data))
    self.assertEqual(found.data.tokenizer_path, str(self.root))
    self.assertEqual(found.model.vocab_size, self.tokenizer.vocab_size)

  def test_a_tokenizer_without_a_template_gets_one(self):
    tiny_chat.write_rows(self.root / "train.jsonl", {"messages": ask("Q", "a")})
    (self.root / "chat_template.jinja").unlink()
    with self.assertRaisesRegex(ValueError, "training with .*=chatml"):
      self.open()
    source = self.open(template="chatml")
    names = chat.template_names(source.tokenizer())
    self.assertEqual(names, ("default", "chatml"))
    template = chat.Template(source.tokenizer())
    begin, end = tiny_chat.CONFIG["bos_token"], tiny_chat.CONFIG["eos_token"]
    asked = f"{begin}user\na?{end}\n{begin}assistant\n"
    self.assertEqual(template.render(ask("Q")[:1]), asked)
    text, spans = template.answers(ask("Q", "a"))
    trained = [text[first:last] for first, last in spans]
    self.assertEqual(trained, [f"Q{end}", f"a{end}"])

  def test_lacking_data_tokenizers_and_templates_are_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "no conversations to train"):
      self.open()
    tiny_chat.write_rows(self.root / "train.jsonl", {"messages": ask("one")})
    for fields, message in (
      ({"path": "/no"}, "examples.docstrings /no"),
      ({"template": "rag"}, "no chat template 'rag' .*, only default"),
      ({"tokenizer_path": ""}, "tokenizer_path='' must name a"),
      ({"tokenizer_path": "bytes"}, "tokenizer_path='bytes' must have"),
    ):
      with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
        self.open(**fields)
    with self.assertRaisesRegex(ValueError, "more than model.vocab_size=9"):
      ChatSource(self.data(), 9, "train")


class PreferenceTest(tiny_chat.ChatTest):
  def _open(self, *rows, **fields):
    return self.open(*rows, kind=PreferenceSource, **fields)

  def test_all_forms_of_pairs_are_read(self):
    better, worse = ask("two "), ask("Q")
    pairs = [
      {"prompt": "a?", "chosen": "two ", "rejected": "Q"},
      {"prompt": better[:1], "chosen": better[1:], "rejected": worse[1:]},
      {"chosen": better, "rejected": worse},
      {"prompt": "a?", "chosen": better, "rejected": worse, "score": 1},
    ]
    source = self._open(*pairs, sequence_length=128)
    self.assertLen(source, 4)
    for index in range(4):
      jax.tree.map(np.testing.assert_array_equal, source[index], source[0])
    one = source[0]
    for segment, text in ((1, "two <|stop|>"), (2, "Q<|stop|>")):
      place = (one["segments"] == segment) & (one["weights"] > 0)
      self.assertEqual(self.decode(one["targets"][place]), text)
    held_out = self._open(*pairs, split="val", sequence_length=256)
    self.assertEqual(held_out.text_bytes(np.arange(len(held_out))), 4 * 4)
    shown = "".join(self.trained(held_out))
    self.assertEqual(shown, "two <|stop|>" * 4)

  def test_questions_of_tables_and_after_a_system_message_stand_once(self):
    asked, better, worse = user("a?"), bot("two "), bot("Q")
    said = {"role": "system", "content": "é"}
    for before in ([], [said]):
      want = [[*before, asked, better], [*before, asked, worse]]
      # As tables have it.
      whole = [[{**m, "tool_calls": None} for m in side] for side in want]
      for prompt in ("a?", [asked]):
        row = {"prompt": prompt, "chosen": whole[0], "rejected": whole[1]}
        self.assertEqual(read_pair(row), want)

  def test_long_pairs_are_cut_or_skipped(self):
    pair = {"prompt": "a?", "rejected": "Q"}
    rows = [pair | {"chosen": "two " * n} for n in (1, 40)]
    self.assertLen(self._open(*rows, sequence_length=80), 2)
    self.assertLen(self._open(sequence_length=80, too_long="skip"), 1)

  @parameterized.parameters(
    ({"prompt": "a", "chosen": "b"}, "missing required field `rejected`"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "must differ"),
    ({"chosen": "b", "rejected": "c"}, "'chosen' must be the answer to a"),
    ({"prompt": [*ask("b"), user("")], "chosen": [], "rejected": "c"},
     "'prompt' must be"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, "got `int` - .*prompt"),
    ({"prompt": "a", "chosen": "b", "rejected": [user("")]},
     "no message of 'assistant'"),
  )  # fmt: skip
  def test_bad_pairs_are_named(self, row, message):
    with self.assertRaisesRegex(ValueError, f"train.jsonl:1: .*{message}"):
      self._open(row)


class InspectTest(tiny_chat.ChatTest):
  def test_trained_text_is_shown_between_marks(self):
    tiny_chat.write_rows(self.root / "train.jsonl", {"messages": ask("one")})
    config = tiny.llm_config(model={"vocab_size": 320, "max_length": 128})
    data = self.data(sequence_length=64)
    config = dataclasses.replace(config, data=data)
    options = inspect_cli.Options(config="x", batch="-")
    _, text, *_ = inspect_cli._texts(config, options)
    self.assertStartsWith(text, "<|start|>user\na?<|stop|>\n<|start|>assistant")
    self.assertRegex(text, r"assistant\n\[\[one<\|stop\|>\]\]\n")
