"""Conversations: what is trained in them, how they are read and packed."""

import abc
import dataclasses
import inspect
import json
import pathlib
import pkgutil
import random
from unittest import mock

import jax
import numpy as np
import tokenizers as hf
from absl.testing import absltest, parameterized

from docs.examples import docstrings
from moh_jax.cli import inspect as inspect_cli
from moh_jax.config import TextDataConfig
from moh_jax.data import conversations, infer
from moh_jax.data.chat import Template
from moh_jax.data.conversations import (
  ChatSource,
  PreferenceSource,
  best_fit,
  read_pair,
)
from tests.data import tiny_chat
from tests.folders import FolderTest
from tests.training import tiny

_RECORDED = pathlib.Path(__file__).parent / "recorded" / "chat"


def _talk(rng):
  """A random conversation, whose answers are not empty."""
  roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"]
  roles += ["user", "assistant"] * rng.randint(0, 2)
  return [
    {
      "role": role,
      "content": "".join(rng.choices(tiny_chat.WORDS, k=rng.randint(0, 9))),
    }
    for role in roles
  ]


def _ask(*answers, question="a?"):
  messages = []
  for answer in answers:
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
  return messages


# Of templates without marks.
_LINES = (
  "{% for m in messages %}{{ 'User ' if m.role == 'user' else 'Bot ' }}"
  "{{ m.content }}END{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}Bot {% endif %}"
)
_HIDES = (
  "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
  "<|stop|>{% elif m.role == 'assistant' %}A:{{ m.content }}{{ '\n' }}"
  "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
_ROLES = (
  "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_CALLS = (
  "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0] }}"
  "{% else %}{{ m.content }}{% endif %}<|stop|>{% endfor %}"
)
_TWO = _ask("one", "two")
_CALL = {"role": "assistant", "content": None, "tool_calls": ["f(None)"]}
_STOPPED = ["one<|stop|>", "None<|stop|>", "f(None)<|stop|>"]
_TALK = ["one\n", "two\n"]
_CHANGED = (
  "{% for m in messages %}{% set y %}{% generation %}{{ m.content }}"
  "{% endgeneration %}{% endset %}{{ WHAT }}{% endfor %}"
)
_PLAIN = "{% for m in messages %}{{ m.content }}<|stop|>{% endfor %}"
_AS_PYTHON = "writes the content of message 1, .* Python does: "
# Template, messages, answers; None where the template is refused.
_UNMARKED = (
  # Turns that end with nothing, and with a token at the end of the text.
  (_LINES.replace("END", ""), _TWO, _TALK),
  (_LINES.replace("END", "{{ eos_token if loop.last }}"), _TWO, None),
  # The user's turn alone has a stop.
  (_LINES.replace("END", "{{ eos_token if m.role == 'user' }}"), _TWO, _TALK),
  # A message that is not written hides no stop.
  (_HIDES, [*_TWO[:2], {"role": "tool", "content": "T"}, *_TWO[2:]], _TALK),
  # A stop in the words of a later message ends no answer.
  *(
    (_ROLES, _ask("one", "two", question=asked), _TALK)
    for asked in ("<|stop|>?", "b <|stop|>", "x<|stop|>")
  ),
  # Contents beside calls may be nothing.
  (_CALLS, [*_ask("one", question="None?"), *_ask("None"), _CALL], _STOPPED),
  # Templates that leave turns out, or rewrite them.
  ("{{ messages[-1].content }}", _TWO, None),
  ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", _TWO, None),
  (
    "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    *(_TWO, None),
  ),
  (
    "{% for m in messages %}{{ m.content.split('.')[0] }}{% endfor %}",
    *(_ask("b. c"), None),
  ),
  (
    "{% for m in messages %}{{ m.content if m.role == 'user' }}<|stop|>"
    "{% endfor %}",
    *(_ask("stop"), None),
  ),
  (
    "{% for m in messages %}{{ m.content[0].text or m.content }}<|stop|>"
    "{% endfor %}",
    *(_ask([{"text": "one"}, {"text": "one"}]), None),
  ),
)


class AnswersTest(parameterized.TestCase):
  @parameterized.product(
    name=("chatml", "llama3", "qwen3"), marked=(False, True)
  )
  def test_trained_tokens_are_those_that_transformers_marks(self, name, marked):
    from transformers import PreTrainedTokenizerFast

    ours = tiny_chat.tokenizer(tiny_chat.template(name, marks=marked))
    theirs = PreTrainedTokenizerFast(
      tokenizer_object=hf.Tokenizer.from_str(ours.content.decode()),
      **tiny_chat.CONFIG,
    )
    template, rng = Template(ours), random.Random(0)
    for _ in range(40):
      messages = _talk(rng)
      expected = theirs.apply_chat_template(
        messages,
        chat_template=tiny_chat.template(name, marks=True),
        return_assistant_tokens_mask=True,
        return_dict=True,
      )
      text, spans = template.answers(messages)
      encoded = ours.parser.encode(text, add_special_tokens=False)
      self.assertEqual(encoded.ids, expected["input_ids"])
      trained = conversations._in_spans(encoded.offsets, spans)
      self.assertEqual(trained.tolist(), expected["assistant_masks"], messages)

  @parameterized.parameters(
    *(("llama2", "</s>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")),
    *(("chatml", "<|im_end|>"), ("gemma", "<end_of_turn>")),
  )
  def test_answers_of_public_templates_end_with_their_stop(self, name, stop):
    source = _RECORDED / f"{name}.jinja"
    config = {"eos_token": stop, "bos_token": "<|begin_of_text|>"}
    tokenizer = tiny_chat.tokenizer(
      source.read_text(), (*tiny_chat.SPECIAL, stop), config
    )
    text, spans = Template(tokenizer).answers(_ask("one", " two\n"))
    shown = [text[slice(*span)].replace(" ", "") for span in spans]
    self.assertEqual(
      [x.replace("\n", "") for x in shown], [f"one{stop}", f"two{stop}"]
    )

  @parameterized.parameters(*_UNMARKED)
  def test_an_answer_is_what_others_would_change(
    self, source, messages, expected
  ):
    template = Template(tiny_chat.tokenizer(source))
    if expected is None:
      with self.assertRaisesRegex(
        ValueError, "template.jinja: does not write message 1 as an answer"
      ):
        template.answers(messages)
      return
    text, spans = template.answers(messages)
    self.assertEqual([text[slice(*span)] for span in spans], expected)

  def test_an_answer_may_hold_its_stop(self):
    template = Template(tiny_chat.tokenizer(tiny_chat.template("chatml")))
    text, spans = template.answers(_ask("one<|stop|>", "two"))
    shown = [text[slice(*span)] for span in spans]
    self.assertEqual(shown, ["one<|stop|>", "two<|stop|>"])

  _TURN = (
    "({{ m.role }}){% if m.role == 'assistant' %}\n{%- generation %}\n  "
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
  )

  @parameterized.parameters(
    "{% for m in messages %}TURN{% endfor %}",
    "{% for m in messages recursive %}TURN{% endfor %}",
    "{% macro f(m) %}TURN{% endmacro %}{% for m in messages %}{{ f(m) }}"
    "{% endfor %}",
    "{% for m in messages %}{% set y %}TURN{% endset %}{{ y }}{% endfor %}",
    "{% for m in messages %}{% set y %}  TURN{% endset %}{{ y | trim }}"
    "{% endfor %}",
    "{% filter trim %}  {% for m in messages %}TURN{% endfor %}{% endfilter %}",
    "{% macro f(m) %}{{ caller() }}{% endmacro %}{% for m in messages %}"
    "{% call f(m) %}TURN{% endcall %}{% endfor %}",
    "{% set y %}{% generation %}zzz{% endgeneration %}{% endset %}"
    "{% for m in messages %}TURN{% endfor %}",
    "{% filter upper %}{% for m in messages %}TURN{% endfor %}{% endfilter %}",
  )
  def test_marks_hold_wherever_they_are_written(self, source):
    template = source.replace("TURN", self._TURN)
    text, spans = Template(tiny_chat.tokenizer(template)).answers(
      _ask("ß one", "two")
    )
    shown = [text[slice(*span)].strip().lower() for span in spans]
    self.assertEqual(shown, ["ss one" if "upper" in source else "ß one", "two"])

  @parameterized.parameters(
    *(
      (_CHANGED.replace("WHAT", what), "a" * 40, "with a character at each")
      for what in ("y[:30]", "y | length", "y | upper | reverse")
    ),
    (_PLAIN, [{"type": "text", "text": "one"}], _AS_PYTHON + ".{'type"),
    (_PLAIN, None, _AS_PYTHON + "None"),
    ("{{ '\\ud83d\\ude00' }}" + _PLAIN, "one", "surrogates not allowed"),
  )
  def test_what_cannot_be_trained_is_refused(self, source, content, message):
    with self.assertRaisesRegex(ValueError, f"jinja: .*{message}"):
      Template(tiny_chat.tokenizer(source)).answers(_ask(content, "two"))

  @parameterized.parameters(True, False)
  def test_tokens_of_spaces_are_in_their_answer(self, trim):
    made = tiny_chat.tokenizer("").parser
    made.post_processor = hf.processors.ByteLevel(trim_offsets=trim)
    text = "a\t\tq  b"
    encoded = made.encode(text)
    spans = [(0, 3), (4, 6)]
    trained = conversations._in_spans(encoded.offsets, spans)
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
    loads = [
      sorted(int(sizes[b].sum()) for b in bins) for bins in (found, expected)
    ]
    self.assertEqual(*loads)


class _ChatTest(FolderTest):
  """Tests with a tokenizer and a template in their folder."""

  def setUp(self):
    super().setUp()
    self.tokenizer = tiny_chat.write_tokenizer(self.root)

  def _write(self, name, *rows):
    tiny_chat.write_rows(self.root / name, *rows)

  def _data(self, **fields):
    root = str(self.root)
    fields = {"path": root, "tokenizer_path": root, **fields}
    return TextDataConfig(source="chat", **fields)

  def _open(self, split="train", vocab_size=400, **fields):
    return ChatSource(self._data(**fields), vocab_size, split)


class SourceTest(_ChatTest):
  def _text(self, ids):
    decode = self.tokenizer.parser.decode
    return decode(ids.tolist(), skip_special_tokens=False)

  def _shown(self, source):
    """Trained text of each sequence."""
    result = []
    for index in range(len(source)):
      one = source[index]
      result.append(self._text(one["targets"][one["weights"] > 0]))
    return result

  def test_all_forms_of_rows_are_read(self):
    share = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "two"}]
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "three"}
    self._write(
      "train.jsonl",
      {"messages": _ask("one")},
      "",
      {"conversations": share},
      alpaca,
    )
    source = self._open(sequence_length=200)
    (shown,) = self._shown(source)
    answers = shown.split("<|stop|>")
    self.assertCountEqual(answers, ["one", "two", "three", ""])
    text = self._text(source[0]["inputs"])
    self.assertIn("user\nAdd.\n\n1 2<|stop|>", text)
    self.assertEqual(source.text_bytes(np.array([0])), len("threetwoone"))

  def test_splits_are_found_in_names_and_folders(self):
    import pyarrow as pa
    import pyarrow.parquet

    # A field that is null in all rows has no type.
    rows = [
      {"messages": [{**m, "name": None} for m in _ask(x)]} for x in ("é", "two")
    ]
    rows[0]["messages"][1]["tool_calls"] = [{"name": "add"}]
    rows[1]["messages"][1]["tool_calls"] = None
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, self.root / "train-00000-of-00001.parquet")
    folder = self.root / "validation"
    folder.mkdir()
    with pa.OSFile(str(folder / "data-0.arrow"), "wb") as file:
      with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    (self.root / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for split in ("train", "val"):
      found = self._shown(self._open(split, sequence_length=100))
      self.assertEqual(found, ["é<|stop|>two<|stop|>"], split)

  def test_long_conversations_are_cut_or_skipped(self):
    talks = [_ask("one"), _ask("one", "b" * 99), _ask("c", question="b" * 99)]
    self._write("train.jsonl", *({"messages": talk} for talk in talks))
    for too_long, expected in (("cut", 2), ("skip", 1)):
      with self.assertLogs(conversations.__name__, "INFO") as logs:
        source = self._open(sequence_length=60, too_long=too_long)
      self.assertLen(source, expected)
      self.assertIn(
        f"2 (data.too_long={too_long}), left out: {3 - expected}",
        logs.output[0],
      )
    with self.assertRaisesRegex(ValueError, "none of 3 conversations has an"):
      self._open(sequence_length=4)

  def test_identity_tells_answers_templates_and_forms_apart(self):
    self._write("train.jsonl", {"messages": _ask("one")})
    first = self._open().identity()
    self.assertEqual(self._open().identity(), first)
    self._write("train.jsonl", {"messages": _ask("two")})
    self.assertNotEqual(self._open().identity(), first)
    self._write("train.jsonl", {"messages": _ask("one")})
    other = tiny_chat.template("qwen3")
    (self.root / "chat_template.jinja").write_text(other)
    self.assertNotEqual(self._open().identity(), first)

  def test_tokenizer_is_that_of_the_checkpoint(self):
    config = tiny.llm_config(
      model={"vocab_size": None}, train={"init_from": str(self.root)}
    )
    data = self._data(tokenizer_path="", sequence_length=16)
    found = infer.resolve(dataclasses.replace(config, data=data))
    self.assertEqual(found.data.tokenizer_path, str(self.root))
    self.assertEqual(found.model.vocab_size, self.tokenizer.vocab_size)

  @parameterized.parameters(
    ("{", ":2: not JSON"),
    ('{"text": "a"}', r":2: a row must have 'messages'.* found \['text'\]"),
    ('{"messages": []}', r":2: messages=\[\] must be a list, and not empty"),
    ('{"messages": [{"content": "a"}]}', r":2: message 0: .*`role`"),
    (
      '{"messages": [{"role": "bot", "content": "a"}]}',
      r":2: message 0: role 'bot' must be one of",
    ),
    (
      '{"messages": [{"role": "user", "content": "a"}]}',
      r":2: no message of 'assistant' in roles \['user'\]",
    ),
    ('{"conversations": [{"from": ["gpt"], "value": ""}]}', ":2: message 0: "),
    ('{"instruction": "a", "output": 3}', r":2: message 1: .*got `int`"),
    ('{"instruction": "a", "output": "\\ud800"}', ":2: .*surrogates"),
    ('{"instruction": ["a"], "output": "b"}', r":2: instruction=\['a'\] mu"),
    (
      '{"instruction": "a", "output": "b<|stop|>c"}',
      ":2: chat_template.jinja: does not write message 1",
    ),
  )
  def test_bad_rows_are_named(self, row, message):
    self._write("train.jsonl", {"messages": _ask("one")}, row)
    with self.assertRaisesRegex(ValueError, f"train.jsonl.*{message}"):
      self._open()

  def test_lacking_data_tokenizers_and_templates_are_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "examples.docstrings .*/no"):
      self._open(path=str(self.root / "no"))
    with self.assertRaisesRegex(FileNotFoundError, "no conversations to train"):
      self._open()
    self._write("train.jsonl", {"messages": _ask("one")})
    with self.assertRaisesRegex(ValueError, "more than model.vocab_size=9"):
      self._open(vocab_size=9)
    with self.assertRaisesRegex(ValueError, "template 'rag' must be one of"):
      self._open(template="rag")
    with self.assertRaisesRegex(ValueError, "tokenizer_path='' must name a"):
      self._open(tokenizer_path="")
    with self.assertRaisesRegex(ValueError, "'bytes' does not tell which text"):
      self._open(tokenizer_path="bytes")
    with self.assertRaisesRegex(ValueError, "data.template='a' must be ''"):
      TextDataConfig(template="a")


class PreferenceTest(_ChatTest):
  def _open(self, split="train", **fields):
    data = dataclasses.replace(self._data(**fields), source="preference")
    return PreferenceSource(data, 400, split)

  def test_all_forms_of_pairs_are_read(self):
    better, worse = _ask("two "), _ask("Q")
    pairs = [
      {"prompt": "a?", "chosen": "two ", "rejected": "Q"},
      {"prompt": better[:1], "chosen": better[1:], "rejected": worse[1:]},
      {"chosen": better, "rejected": worse},
      {"prompt": "a?", "chosen": better, "rejected": worse, "score": 1},
    ]
    self._write("train.jsonl", *pairs)
    self._write("val.jsonl", *pairs)
    source = self._open(sequence_length=128)
    self.assertLen(source, 4)
    for index in range(4):
      jax.tree.map(np.testing.assert_array_equal, source[index], source[0])
    one, decode = source[0], self.tokenizer.parser.decode
    for segment, text in ((1, "two "), (2, "Q")):
      place = (one["segments"] == segment) & (one["weights"] > 0)
      self.assertEqual(decode(one["targets"][place].tolist()), text)
    held_out = self._open("val", sequence_length=256)
    shown = [
      decode(held_out[i]["targets"].tolist()) for i in range(len(held_out))
    ]
    self.assertEqual("".join(shown).count("two"), 4)
    self.assertNotIn("Q", "".join(shown))

  def test_questions_of_tables_and_after_a_system_message_stand_once(self):
    ask, better, worse = (*_ask("two ")[:1], _ask("two ")[1], _ask("Q")[1])
    said = {"role": "system", "content": "é"}
    empty = {"tool_calls": None}  # as tables have it
    for before in ([], [said]):
      want = [[*before, ask, better], [*before, ask, worse]]
      whole = [[{**one, **empty} for one in side] for side in want]
      for asked in ("a?", [ask]):
        row = {"prompt": asked, "chosen": whole[0], "rejected": whole[1]}
        self.assertEqual(read_pair(row), want)

  def test_long_pairs_are_cut_or_skipped(self):
    rows = [
      {"prompt": "a?", "chosen": "two " * n, "rejected": "Q"} for n in (1, 40)
    ]
    self._write("train.jsonl", *rows)
    self.assertLen(self._open(sequence_length=80), 2)
    self.assertLen(self._open(sequence_length=80, too_long="skip"), 1)

  @parameterized.parameters(
    (
      {"prompt": "a", "chosen": "b"},
      "must have 'chosen' and 'rejected', found",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "must differ"),
    ({"chosen": "b", "rejected": "c"}, "'chosen' must be the answer to a"),
    (
      {"prompt": 3, "chosen": "b", "rejected": "c"},
      "must be texts or messages",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": [4]}, "message 1"),
    (
      {
        "prompt": "a",
        "chosen": "b",
        "rejected": [{"role": "user", "content": ""}],
      },
      "no message of 'assistant'",
    ),
  )
  def test_bad_pairs_are_named(self, row, message):
    self._write("train.jsonl", row)
    with self.assertRaisesRegex(ValueError, f"train.jsonl:1: .*{message}"):
      self._open()


class InspectTest(_ChatTest):
  def test_trained_text_is_shown_between_marks(self):
    self._write("train.jsonl", {"messages": _ask("one")})
    data = self._data(sequence_length=64)
    config = tiny.llm_config(model={"vocab_size": 320, "max_length": 128})
    config = dataclasses.replace(config, data=data)
    options = inspect_cli.Options(config="x", batch="-")
    head, text, *_ = inspect_cli._texts(config, options)
    self.assertIn("of 64", head)
    self.assertStartsWith(text, "<|start|>user\na?<|stop|>\n<|start|>assistant")
    self.assertRegex(text, r"assistant\n\[\[one<\|stop\|>\]\]\n")


class DocstringsTest(FolderTest):
  def test_names_are_answered_by_their_docstrings(self):
    files = [pathlib.Path(m.__file__) for m in (abc, json.decoder)]
    parts = [files[:1], files[1:]]
    with mock.patch.object(docstrings, "list_sources", lambda: parts):
      docstrings.write(self.root)
    root, asked = str(self.root), []
    data = TextDataConfig("chat", root, tokenizer_path=root)
    data = dataclasses.replace(data, sequence_length=512)
    for split in ("train", "val"):
      source = ChatSource(data, 2048, split)
      lines = (self.root / f"{split}.jsonl").read_text().splitlines()
      packed = sum(source[i]["segments"].max() for i in range(len(source)))
      self.assertEqual(packed, len(lines))
      for line in lines:
        question, answer = json.loads(line)["messages"]
        asked.append(question["content"])
        name = question["content"].split()[2]
        told = " ".join(inspect.getdoc(pkgutil.resolve_name(name)).split())
        self.assertStartsWith(told, answer["content"])
    self.assertIn("What does abc.ABC do?", asked)
    self.assertIn("What does json.decoder.JSONDecoder.decode do?", asked)


if __name__ == "__main__":
  absltest.main()
