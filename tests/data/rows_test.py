"""What rows of conversations say beside messages, as text and as masks."""

import gzip
import json
import random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tokenizers as hf
import zstandard
from absl.testing import parameterized

from moh_jax.config import TextDataConfig
from moh_jax.data import conversations, files, infer
from moh_jax.data.conversations import ChatSource, PreferenceSource
from tests.data import tiny_chat
from tests.folders import FolderTest
from tests.training import tiny

_TOOLS = [
  {
    "type": "function",
    "function": {
      "name": name,
      "description": f"the {name}",
      "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "default": None}},
      },
    },
  }
  for name in ("weather", "time")
]


def _user(text):
  return {"role": "user", "content": text}


def _bot(text, **fields):
  return {"role": "assistant", "content": text, **fields}


def _call(*names, flat=False, **arguments):
  arguments = arguments or {"town": "Paris", "unit": None}
  calls = [{"name": name, "arguments": arguments} for name in names]
  if not flat:
    calls = [{"type": "function", "function": call} for call in calls]
  return {"tool_calls": calls}


_SYSTEM = {"role": "system", "content": "be brief"}
_CALLED = [
  _user("weather in Paris?"),
  _bot(None, **_call("weather")),
  {"role": "tool", "content": "fine"},
  _bot("it was fine"),
]
_TWO_CALLS = [
  _user("weather and time?"),
  _bot("I look.", **_call("weather", "time")),
  {"role": "tool", "content": "fine"},
  {"role": "tool", "content": "late"},
  _bot("fine, and late"),
]
_FLAT = [_user("time?"), _bot("", **_call("time", flat=True, town="Rome"))]
_TURNS = [_user("a?"), _bot("one"), _user("b?"), _bot("two ")]
_SHARED = [
  {"from": "human", "value": "a?"},
  {"from": "gpt", "value": "one"},
  {"from": "human", "value": "b?"},
  {"from": "gpt", "value": "two "},
]
_ALPACA = {"instruction": "Add.", "input": "1 2", "output": "three"}
_ADDED = [_user("Add.\n\n1 2"), _bot("three")]
_DATE = {"date": "Monday"}
_ALL, _WITH_TOOLS, _MANY = (
  ("chatml", "llama31", "qwen"),
  ("llama31", "qwen"),
  ("qwen",),
)


class _Case(NamedTuple):
  """A row, and what transformers gets for it with templates of some names."""

  templates: tuple[str, ...]
  row: dict[str, Any]
  messages: list[dict[str, Any]]
  tools: list[dict[str, Any]] | None = None
  options: dict[str, Any] | None = None
  trained: tuple[int, ...] = (0, 1)  # which answers


_WITH = {"messages": _CALLED, "tools": _TOOLS}
_UNTRAINED = {**_SHARED[3], "weight": 0}
_HALF = [_CALLED[0], {**_CALLED[1], "weight": 1}, _CALLED[2]]
_CASES = (
  _Case(_WITH_TOOLS, _WITH, _CALLED, _TOOLS),
  _Case(
    _WITH_TOOLS,
    {"messages": _CALLED, "tools": json.dumps(_TOOLS[:1]), "id": 3},
    *(_CALLED, _TOOLS[:1]),
  ),
  _Case(
    *(_WITH_TOOLS, {**_WITH, "system": "be brief"}),
    *([_SYSTEM, *_CALLED], _TOOLS),
  ),
  _Case(
    _WITH_TOOLS,
    {"messages": _CALLED, "chat_template_kwargs": _DATE},
    *(_CALLED, None, _DATE),
  ),
  _Case(
    _WITH_TOOLS,
    {
      "conversations": _SHARED,
      "system": "be brief",
      "tools": json.dumps(_TOOLS),
      "chat_template_kwargs": json.dumps(_DATE),
    },
    *([_SYSTEM, *_TURNS], _TOOLS, _DATE),
  ),
  _Case(_MANY, {"messages": _TWO_CALLS, "tools": _TOOLS}, _TWO_CALLS, _TOOLS),
  _Case(_MANY, {"messages": _FLAT, "tools": "[]"}, _FLAT),
  _Case(
    _ALL,
    {"conversations": _SHARED, "system": "be brief"},
    [_SYSTEM, *_TURNS],
  ),
  _Case(
    _ALL,
    {**_ALPACA, "system": "be brief", "history": [["a?", "one"]]},
    [_SYSTEM, *_TURNS[:2], *_ADDED],
  ),
  _Case(
    _ALL,
    {"messages": [_TURNS[0], _bot("one", weight=0), *_TURNS[2:]]},
    *(_TURNS, None, None, (1,)),
  ),
  _Case(
    _ALL,
    {"conversations": [*_SHARED[:3], _UNTRAINED], "tools": None},
    *(_TURNS, None, None, (0,)),
  ),
  _Case(
    _WITH_TOOLS,
    {"messages": [*_HALF, _bot("it was fine", weight=0)], "tools": _TOOLS},
    *(_CALLED, _TOOLS, None, (0,)),
  ),
)


class _RowsTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.tokenizer = tiny_chat.write_tokenizer(self.root)

  def _template(self, source, marked=False):
    if source in _ALL:
      source = tiny_chat.template(source, marks=marked)
    source = tiny_chat.marked(source, marks=marked)
    (self.root / "chat_template.jinja").write_text(source)

  def _open(self, *rows, name="train.jsonl", kind=ChatSource, **fields):
    if rows:
      tiny_chat.write_rows(self.root / name, *rows)
    root, source = str(self.root), "chat"
    if kind is PreferenceSource:
      source = "preference"
    fields = {"path": root, "tokenizer_path": root} | fields
    fields = {"sequence_length": 2000, "source": source} | fields
    return kind(TextDataConfig(**fields), 400, "train")

  def _tokens(self, source, segment=1):
    """Ids of a packed conversation, and which of them are trained."""
    one = source[0]
    place = one["segments"] == segment
    ids = [*one["inputs"][place], one["targets"][place][-1]]
    return ids, [0.0, *one["weights"][place]]

  def _answers(self, source):
    """What is trained, between the tokens that end turns."""
    ids, weights = self._tokens(source)
    kept = [int(i) for i, weight in zip(ids, weights) if weight]
    text = self.tokenizer.parser.decode(kept, skip_special_tokens=False)
    return text.split("<|stop|>")[:-1]


class TextTest(_RowsTest):
  @parameterized.parameters(
    *(
      (name, marked, index)
      for index, case in enumerate(_CASES)
      for name in case.templates
      for marked in (False, True)
    )
  )
  def test_rows_are_what_transformers_makes_of_them(self, name, marked, index):
    from transformers import PreTrainedTokenizerFast

    case = _CASES[index]
    theirs = PreTrainedTokenizerFast(
      tokenizer_object=hf.Tokenizer.from_str(self.tokenizer.content.decode()),
      **tiny_chat.CONFIG,
    )
    expected = theirs.apply_chat_template(
      case.messages,
      tools=case.tools,
      chat_template=tiny_chat.template(name, marks=True),
      return_assistant_tokens_mask=True,
      return_dict=True,
      **(case.options or {}),
    )
    mask = np.array(expected["assistant_masks"])
    number = np.cumsum(np.diff(mask, prepend=0) == 1) - 1  # of runs of ones
    mask = mask * np.isin(number, case.trained)
    self._template(name, marked)
    ids, weights = self._tokens(self._open(case.row))
    self.assertEqual(ids, expected["input_ids"])
    self.assertEqual(weights, mask.tolist())

  def test_tools_of_tables_have_the_fields_of_their_row(self):
    import pyarrow as pa
    import pyarrow.parquet

    self._template("qwen")
    rows = []
    for name, argument in (("weather", "town"), ("time", "zone")):
      one = {"name": name, "parameters": {argument: {"type": "string"}}}
      talk = [_user("a?"), _bot(None, **_call(name, **{argument: "é"}))]
      rows.append({"messages": talk, "tools": [one]})
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, self.root / "train.parquet")
    whole = self._open()
    (self.root / "train.parquet").unlink()
    self.assertEqual(self._open(*rows).identity(), whole.identity())

  def test_both_answers_have_tools_and_a_system_message(self):
    self._template("qwen")
    more = {
      "tools": _TOOLS,
      "system": "be brief",
      "chat_template_kwargs": _DATE,
    }
    row = {"prompt": "a?", "chosen": "one", "rejected": "two "}
    row |= {"history": [["b?", "Q"]]} | more
    pair = self._open(row, kind=PreferenceSource)
    for segment, said in ((1, "one"), (2, "two ")):
      talk = [_user("b?"), _bot("Q"), _user("a?"), _bot(said)]
      ids, weights = self._tokens(self._open({"messages": talk, **more}))
      found = self._tokens(pair, segment)
      # The last target of the first one begins the second.
      self.assertEqual(found[0][: len(ids)], ids)
      self.assertEqual(found[1][: len(ids)], weights)
    called = [_user("a?"), _bot("", **_call("time"))]
    row = {"chosen": called, "rejected": [_user("a?"), _bot("no")]}
    kept = [_bot("one", weight=0), _user("c?")]
    row = {k: [_user("b?"), *kept, x[-1]] for k, x in row.items()}
    pair = self._open(row | {"tools": _TOOLS}, kind=PreferenceSource)
    (answer,) = self._answers(pair)
    self.assertIn('"name": "time"', answer)


class RefusedTest(_RowsTest):
  @parameterized.parameters(
    ({"functions": [{"name": "f"}]}, "'functions'"),
    ({"images": ["a.png"]}, "'images'"),
    ({"history": [["a", "b"]]}, "'history'"),
    ({"tools": _TOOLS}, "'tools'"),
    ({"tools": "no json"}, "tools: not valid JSON"),
    ({"tools": [3]}, r"tools: .*\$\[0\]"),
    ({"tools": {"name": "f"}}, "tools: Expected `array"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs: Expected `object"),
    ({"system": ["a"]}, r"system=\['a'\] must be a text"),
    (
      {"messages": [_SYSTEM, *_TURNS], "system": "b"},
      "'system' is given twice",
    ),
    (_user("a") | {"weight": 1}, "message 0: 'weight' 1 is of 'assistant'"),
    (_bot("one", weight=2), "message 0: .*<= 1 .*weight"),
    (_bot("one", train=False), "'train'"),
    (_bot(None, function_call={"name": "f", "arguments": "{}"}), "message 0: "),
    (_bot("", function_call={"name": "f", "arguments": ""}), "'function_call'"),
    (_bot("one", reasoning_content="so"), "'reasoning_content'"),
    (_bot(None), "message 0: 'content'"),
    (_bot(None, tool_calls=3), "message 0: .*tool_calls"),
  )
  def test_what_is_not_read_is_named(self, said, message):
    row = {"messages": _TURNS} | said
    if "role" in said:
      row = {"messages": [said, *_TURNS]}
    with self.assertRaisesRegex(ValueError, f"train.jsonl:1: .*{message}"):
      self._open(row)

  def test_what_says_nothing_is_left_out(self):
    empty = {"tools": [], "functions": None, "images": [], "system": ""}
    talk = [_user("a?"), _bot("one", tool_calls=[], function_call=None)]
    rows = [{"messages": talk, **empty, "id": 3, "source": "web"}]
    alone = self._open({"messages": [_user("a?"), _bot("one")]})
    self.assertEqual(self._open(*rows).identity(), alone.identity())

  @parameterized.product(marked=(False, True), content=(None, "", "weather"))
  def test_calls_that_are_not_written_are_refused(self, marked, content):
    source = (tiny_chat.TEMPLATES / "chatml.jinja").read_text()
    source = source.replace("m.content +", "(m.content or '') +")
    first = source.replace("m.role + '\\n'", "m.role + '\\n' + BEGIN")
    begin = "(m.tool_calls[0].function.name if m.tool_calls else '')"
    first = first.replace("BEGIN", begin)
    for template, names in (
      (source, ["weather"]),
      (first, ["weather", "time"]),
    ):
      self._template(template, marked)
      talk = [_user("weather?"), _bot(content, **_call(*names))]
      with self.assertRaisesRegex(ValueError, "train.jsonl:1: .*'tool_calls'"):
        self._open({"messages": talk})

  @parameterized.parameters(
    ([_user("a?"), _bot("one")], [_user("b?"), _bot("two ")]),
    ([_SYSTEM, _user("a?"), _bot("one")], [_user("a?"), _bot("two ")]),
    (_TURNS, [*_TURNS[:2], _user("c?"), _bot("two ")]),
    (_TURNS, _TURNS[:2]),
  )
  def test_answers_to_different_questions_are_refused(self, chosen, rejected):
    row = {"chosen": chosen, "rejected": rejected}
    with self.assertRaisesRegex(ValueError, "answers to one question"):
      self._open(row, kind=PreferenceSource)
    row = {"prompt": "else?", **{k: x[-2:] for k, x in row.items()}}
    with self.assertRaisesRegex(ValueError, "'prompt' must be the question"):
      self._open(row, kind=PreferenceSource)

  def test_turns_after_an_answer_may_differ(self):
    other = [_user("a?"), _bot("Q"), _user("c?"), _bot("two ")]
    row = {"chosen": _TURNS, "rejected": other}
    self.assertLen(self._open(row, kind=PreferenceSource), 1)

  def test_speakers_are_named(self):
    talk = [*_SHARED, {"from": "observation", "value": "x"}]
    with self.assertRaisesRegex(
      ValueError, r"train.jsonl:1: message 4: from=.*'human', 'gpt'"
    ):
      self._open({"conversations": talk})


class OpeningTest(_RowsTest):
  """Conversations that the assistant opens."""

  _NEEDS_ONE = (
    "{{ '(' + messages[0].role + ')' }}{% for m in messages %}"
    "{{ m.role + ': ' }}{% if m.role == 'assistant' %}<<{{ m.content }}"
    "<|stop|>>>{% else %}{{ m.content }}<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
  )
  _NEEDS_USER = (
    "{% set _ = (messages | selectattr('role', 'eq', 'user') | list)"
  )
  _NEEDS_USER = f"{_NEEDS_USER}[0].content %}}{_NEEDS_ONE}"

  @parameterized.product(source=(_NEEDS_ONE, _NEEDS_USER), system=(0, 1))
  def test_the_first_answer_is_trained_where_it_is_marked(self, source, system):
    talk = [*[_SYSTEM] * system, _bot("naïve"), *_TURNS]
    row = {"messages": talk}
    self._template(source, marked=True)
    self.assertEqual(self._answers(self._open(row)), ["naïve", "one", "two "])
    self._template(source)
    expected = ["one", "two "]
    if system and source == self._NEEDS_ONE:  # which writes what is before it
      expected.insert(0, "naïve")
    self.assertEqual(self._answers(self._open(row)), expected)

  def test_a_template_never_gets_an_empty_conversation(self):
    source = "{{ raise_exception('empty') if not messages }}" + self._NEEDS_ONE
    self._template(source)
    rows = [{"messages": x} for x in (_TURNS, [_bot("Q"), *_TURNS])]
    self.assertEqual(self._answers(self._open(rows[1])), ["one", "two "])
    with self.assertRaisesRegex(ValueError, "none of 1 conversations"):
      self._open({"messages": [_bot("Q")]})


class FilesTest(_RowsTest):
  def _pack(self, name, content):
    self.root.joinpath(name).write_bytes(content)

  @parameterized.product(
    packing=("", ".gz", ".zst"), mark=(b"", b"\xef\xbb\xbf\n")
  )
  def test_one_list_is_rows(self, packing, mark):
    rows = [_ALPACA, {"conversations": _SHARED}, {"messages": _CALLED[:1] * 2}]
    rows[2]["messages"] = [_user("é"), _bot("three")]
    expected = self._open(*rows).identity()
    (self.root / "train.jsonl").unlink()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(
      packing, bytes
    )
    content = mark + json.dumps(rows, indent=len(mark) or None).encode()
    self._pack(f"train.json{packing}", pack(content))
    self.assertEqual(self._open().identity(), expected)

  def test_bad_entries_and_lists_are_named(self):
    self._pack("train.json", json.dumps([_ALPACA, {"text": "a"}]).encode())
    with self.assertRaisesRegex(
      ValueError, r"train.json:2: a row must have 'm"
    ):
      self._open()
    self._pack("train.json", json.dumps([_ALPACA, 3]).encode())
    with self.assertRaisesRegex(ValueError, "train.json:2: no JSON obj"):
      self._open()
    for on_error in ("stop", "skip"):
      self._pack("train.json", json.dumps([_ALPACA, _ALPACA]).encode()[:-9])
      with self.assertRaisesRegex(ValueError, "train.json: damaged or cannot"):
        self._open(on_error=on_error)

  def test_lists_are_documents_and_prompts(self):
    texts = [f"text {i}" for i in range(20)]
    path = self.root / "a.json"
    path.write_text(json.dumps([{"prompt": x} for x in texts]))
    self.assertEqual(files.read_prompts(str(path)), texts)
    found = files.read_documents(str(path), "prompt")
    self.assertEqual([text for _, text in found], texts)
    path.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts))
    self.assertEqual(files.read_prompts(str(path)), texts)

  @parameterized.parameters(ChatSource, PreferenceSource)
  def test_bad_rows_are_counted_and_left_out(self, kind):
    good = [{"messages": _TURNS}, _ALPACA]
    if kind is PreferenceSource:
      good = [
        {"prompt": "a?", "chosen": x, "rejected": "Q"} for x in ("one", "two ")
      ]
    expected = self._open(*good, kind=kind).identity()
    bad = ["{", "[3]", {"text": "a"}, {"messages": [_user("a")]}]
    bad += [{**good[0], "images": ["a.png"]}, {**good[1], "tools": "3"}]
    rows = good + bad
    random.Random(0).shuffle(bad)
    rows = [bad[0], good[0], *bad[1:], good[1]]
    with self.assertLogs(conversations.__name__, "INFO") as logs:
      found = self._open(*rows, kind=kind, on_error="skip")
    self.assertEqual(found.identity(), expected)
    self.assertRegex(logs.output[0], "6 bad rows: .*train.jsonl:1: ")
    with self.assertRaisesRegex(ValueError, "train.jsonl:1: "):
      self._open(*rows, kind=kind)
    with self.assertRaisesRegex(ValueError, "none of 0 .*; 6 bad rows: .*:1: "):
      self._open(*bad, kind=kind, on_error="skip")

  def test_epochs_read_the_conversations_once(self):
    tiny_chat.write_rows(self.root / "val.jsonl", _ALPACA)
    tiny_chat.write_rows(self.root / "train.jsonl", *[_ALPACA] * 9)
    root = str(self.root)
    fields = {"source": "chat", "path": root, "tokenizer_path": root}
    config = tiny.llm_config(
      model={"vocab_size": 400, "max_length": 64},
      data={**fields, "sequence_length": 64, "batch_size": 2},
      train={"epochs": 2.0},
    )
    made = []
    with mock.patch.object(
      ChatSource,
      "_read",
      autospec=True,
      side_effect=lambda _, row: (
        made.append(row) or [conversations.read_messages(row)]
      ),
    ):
      resolved = infer.resolve(config)
      self.assertGreater(resolved.train.steps, 1)
      self.assertLen(made, 9)
      tiny.make_task(resolved)
      self.assertLen(made, 10)  # and the held-out one
      tiny_chat.write_rows(self.root / "train.jsonl", *[_ALPACA] * 5)
      tiny.make_task(resolved)
      self.assertLen(made, 16)
