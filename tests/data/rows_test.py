"""What rows of conversations say beside messages, as text and as masks."""

import dataclasses
import datetime
import json
import random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from absl.testing import parameterized

from moh_jax.data import conversations, infer
from moh_jax.data.conversations import ChatSource, PreferenceSource
from tests.data import tiny_chat
from tests.data.tiny_chat import ask, bot, user
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


def _call(*names, flat=False, **arguments):
  arguments = arguments or {"town": "Paris", "unit": None}
  calls = [{"name": name, "arguments": arguments} for name in names]
  if not flat:
    calls = [{"type": "function", "function": call} for call in calls]
  return {"tool_calls": calls}


_SYSTEM = {"role": "system", "content": "be brief"}
_CALLED = [
  user("weather in Paris?"),
  bot(None, **_call("weather")),
  {"role": "tool", "content": "fine"},
  bot("it was fine"),
]
_TWO_CALLS = [
  user("weather and time?"),
  bot("I look.", **_call("weather", "time")),
  {"role": "tool", "content": "fine"},
  {"role": "tool", "content": "late"},
  bot("fine, and late"),
]
_FLAT = [user("time?"), bot("", **_call("time", flat=True, town="Rome"))]
_TURNS = [*ask("one"), *ask("two ", question="b?")]
_NAMES = {"user": "human", "assistant": "gpt"}
_SHARED = [{"from": _NAMES[m["role"]], "value": m["content"]} for m in _TURNS]
_ALPACA = {"instruction": "Add.", "input": "1 2", "output": "three"}
_ADDED = ask("three", question="Add.\n\n1 2")
_DATE = {"date": "Monday"}
_ALL, _WITH_TOOLS, _MANY = (
  ("chatml", "llama31", "qwen"),
  ("llama31", "qwen"),
  ("qwen",),
)


def _talk(seed):
  """A random conversation."""
  rng = random.Random(seed)
  roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"]
  roles += ["user", "assistant"] * rng.randint(0, 2)
  words = (rng.choices(tiny_chat.WORDS, k=rng.randint(0, 9)) for _ in roles)
  return [{"role": r, "content": "".join(x)} for r, x in zip(roles, words)]


class _Case(NamedTuple):
  """A row, and what transformers gets for it with templates of some names."""

  templates: tuple[str, ...]
  row: dict[str, Any]
  messages: list[dict[str, Any]]
  tools: list[dict[str, Any]] | None = None
  options: dict[str, Any] = {}  # noqa: RUF012
  trained: tuple[int, ...] = (0, 1)  # which answers


_WITH = {"messages": _CALLED, "tools": _TOOLS}
_SAID = {"system": "be brief", "tools": json.dumps(_TOOLS)}
_HALF = [_CALLED[0], {**_CALLED[1], "weight": 1}, _CALLED[2]]
_CASES = (
  _Case(_WITH_TOOLS, {**_WITH, "chat_template_kwargs": _DATE, "id": 3},
        _CALLED, _TOOLS, _DATE),
  _Case(_WITH_TOOLS,
        {"conversations": _SHARED, **_SAID,
         "chat_template_kwargs": json.dumps(_DATE)},
        [_SYSTEM, *_TURNS], _TOOLS, _DATE),
  _Case(_MANY, {"messages": _TWO_CALLS, "tools": _TOOLS}, _TWO_CALLS, _TOOLS),
  _Case(_MANY, {"messages": _FLAT, "tools": "[]"}, _FLAT),
  _Case(_ALL, {**_ALPACA, "system": "be brief", "history": [["a?", "one"]]},
        [_SYSTEM, *_TURNS[:2], *_ADDED]),
  _Case(_ALL, {"conversations": [*_SHARED[:3], {**_SHARED[3], "weight": 0}],
               "tools": None},
        _TURNS, trained=(0,)),
  _Case(_WITH_TOOLS,
        {**_WITH, "messages": [*_HALF, bot("it was fine", weight=0)]},
        _CALLED, _TOOLS, trained=(0,)),
  *(_Case(("chatml", "llama3", "qwen3"), {"messages": talk}, talk,
          trained=(0, 1, 2))
    for talk in map(_talk, range(12))),
)  # fmt: skip


class _RowsTest(tiny_chat.ChatTest):
  def _tokens(self, source, segment=1):
    """Ids of a packed conversation, and which of them are trained."""
    one = source[0]
    place = one["segments"] == segment
    ids = [*one["inputs"][place], one["targets"][place][-1]]
    return ids, [0.0, *one["weights"][place]]

  def _answers(self, source):
    """What is trained, between the tokens that end turns."""
    ids, weights = self._tokens(source)
    kept = [i for i, weight in zip(ids, weights) if weight]
    return self.decode(kept).split("<|stop|>")[:-1]


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
    case, theirs = _CASES[index], tiny_chat.in_transformers(self.tokenizer)
    source = tiny_chat.template(name, marks=True)
    expected = theirs(case.messages, source, tools=case.tools, **case.options)
    mask = np.array(expected["assistant_masks"])
    number = np.cumsum(np.diff(mask, prepend=0) == 1) - 1  # of runs of ones
    mask = mask * np.isin(number, case.trained)
    self.use(name, marks=marked)
    ids, weights = self._tokens(self.open(case.row))
    self.assertEqual(ids, expected["input_ids"])
    self.assertEqual(weights, mask.tolist())

  def test_rows_of_tables_have_the_fields_that_they_state(self):
    import pyarrow as pa
    import pyarrow.parquet

    self.use("qwen")
    rows = []
    for name, argument in (("weather", "town"), ("time", "zone")):
      one = {"name": name, "parameters": {argument: {"type": "string"}}}
      talk = [user("a?"), bot(None, **_call(name, **{argument: "é"}))]
      # A field that is null in all rows has no type.
      talk += [{**m, "name": None} for m in ask("one")]
      rows.append({"messages": talk, "tools": [one]})
    table = pa.Table.from_pylist(rows)
    file = self.root / "train-00000-of-00001.parquet"
    pa.parquet.write_table(table, file)
    folder = self.root / "validation"
    folder.mkdir()
    with pa.ipc.new_stream(folder / "data-0.arrow", table.schema) as writer:
      writer.write_table(table)
    # What `datasets` writes beside its tables.
    for name in ("validation/state.json", "dataset_dict.json"):
      (self.root / name).write_text("{}")
    found = [self.open(split=split).identity() for split in ("train", "val")]
    file.unlink()
    self.assertEqual(found, [self.open(*rows).identity()] * 2)

  def test_tables_may_date_their_messages(self):
    import pyarrow as pa
    import pyarrow.parquet

    self.use("qwen")
    talk = [m | {"timestamp": datetime.date(2026, 1, 1)} for m in ask("one")]
    table = pa.Table.from_pylist([{"messages": talk}])
    pa.parquet.write_table(table, self.root / "train.parquet")
    self.assertEqual(self.trained(self.open()), ["one<|stop|>"])

  def test_both_answers_have_tools_and_a_system_message(self):
    self.use("qwen")
    more = {**_SAID, "chat_template_kwargs": _DATE}
    row = {"prompt": "a?", "chosen": "one", "rejected": "two "}
    row |= {"history": [["b?", "Q"]]} | more
    pair = self.open(row, kind=PreferenceSource)
    for segment, said in ((1, "one"), (2, "two ")):
      talk = [*ask("Q", question="b?"), *ask(said)]
      ids, weights = self._tokens(self.open({"messages": talk, **more}))
      found = self._tokens(pair, segment)
      # The last target of the first one begins the second.
      self.assertEqual(found[0][: len(ids)], ids)
      self.assertEqual(found[1][: len(ids)], weights)
    asked = [user("b?"), bot("one", weight=0), user("c?")]
    row = {"chosen": [*asked, bot("", **_call("time"))], "tools": _TOOLS}
    row["rejected"] = [*asked, bot("no")]
    (answer,) = self._answers(self.open(row, kind=PreferenceSource))
    self.assertIn('"name": "time"', answer)


class RefusedTest(_RowsTest):
  @parameterized.parameters(
    ({"messages": None, "text": "a"}, "a row must have 'messages'.* found"),
    ({"messages": []}, r"messages=\[\] must be a list, and not empty"),
    ({"messages": [user("a")]}, r"no message of 'assistant' in roles \['user'"),
    ({"messages": [{"content": "a"}]}, "message 0: .*`role`"),
    ({"messages": ask("b<|stop|>c")}, "jinja: does not write message 1"),
    ({"messages": ask("\ud800")}, "surrogates"),
    ({"messages": None, **_ALPACA, "output": 3}, "message 1: .*got `int`"),
    ({"role": "bot", "content": "a"}, "message 0: role 'bot' must be one of"),
    ({"functions": [{"name": "f"}]}, "'functions'"),
    ({"history": [["a", "b"]]}, "'history'"),
    ({"tools": _TOOLS}, "'tools'"),
    ({"tools": "no json"}, "tools: not valid JSON"),
    ({"tools": [3]}, r"tools: .*\$\[0\]"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs: Expected `object"),
    ({"system": ["a"]}, "Expected `str . null`, .*system"),
    (
      {"messages": None, "conversations": [*_SHARED, {"from": "x"}]},
      "message 4: from='x' must be one of .*'human', 'gpt'",
    ),
    (
      {"messages": [_SYSTEM, *_TURNS], "system": "b"},
      "'system' is given twice",
    ),
    (user("a") | {"weight": 1}, "message 0: 'weight' 1 is of 'assistant'"),
    (bot("one", weight=2), "message 0: .*<= 1 .*weight"),
    (bot(None, function_call={"name": "f", "arguments": "{}"}), "message 0: "),
    (bot("one", reasoning_content="so"), "'reasoning_content'"),
    (bot(None), "message 0: 'content'"),
    (bot(None, tool_calls=3), "message 0: .*tool_calls"),
  )
  def test_what_is_not_read_is_named(self, said, message):
    row = {"messages": _TURNS} | said
    if "role" in said:
      row = {"messages": [said, *_TURNS]}
    with self.assertRaisesRegex(ValueError, f"train.jsonl:1: .*{message}"):
      self.open(row)

  def test_what_says_nothing_is_left_out(self):
    empty = {"tools": [], "functions": None, "images": [], "system": ""}
    talk = [user("a?"), bot("one", tool_calls=[], function_call=None)]
    rows = [{"messages": talk, **empty, "id": 3, "source": "web"}]
    alone = self.open({"messages": ask("one")})
    self.assertEqual(self.open(*rows).identity(), alone.identity())

  @parameterized.product(marked=(False, True), content=(None, "weather"))
  def test_calls_that_are_not_written_are_refused(self, marked, content):
    source = (tiny_chat.TEMPLATES / "chatml.jinja").read_text()
    source = source.replace("m.content +", "(m.content or '') +")
    begin = "(m.tool_calls[0].function.name if m.tool_calls else '')"
    first = source.replace("m.role + '\\n'", f"m.role + '\\n' + {begin}")
    both = ["weather", "time"]
    for template, names in ((source, both[:1]), (first, both)):
      self.use(template, marks=marked)
      talk = [user("weather?"), bot(content, **_call(*names))]
      with self.assertRaisesRegex(ValueError, "train.jsonl:1: .*'tool_calls'"):
        self.open({"messages": talk})

  @parameterized.parameters(
    (ask("one"), ask("two ", question="b?")),
    ([_SYSTEM, *ask("one")], ask("two ")),
    (_TURNS, [*_TURNS[:2], user("c?"), bot("two ")]),
    (_TURNS, _TURNS[:2]),
  )
  def test_answers_to_different_questions_are_refused(self, chosen, rejected):
    row = {"chosen": chosen, "rejected": rejected}
    with self.assertRaisesRegex(ValueError, "answers to one question"):
      self.open(row, kind=PreferenceSource)
    row = {"prompt": "else?", **{k: x[-2:] for k, x in row.items()}}
    with self.assertRaisesRegex(ValueError, "'prompt' must be the question"):
      self.open(row, kind=PreferenceSource)

  def test_turns_after_an_answer_may_differ(self):
    row = {"chosen": _TURNS, "rejected": ask("Q", "two ")}
    self.open(row, kind=PreferenceSource)


class OpeningTest(_RowsTest):
  """Conversations that the assistant opens."""

  _NEEDS_USER = (
    "{% set _ = (messages | selectattr('role', 'eq', 'user') | list)"
    "[0].content %}{{ '(' + messages[0].role + ')' }}{% for m in messages %}"
    "{{ m.role + ': ' }}{% if m.role == 'assistant' %}<<{{ m.content }}"
    "<|stop|>>>{% else %}{{ m.content }}<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
  )

  @parameterized.parameters(0, 1)
  def test_the_first_answer_is_trained_where_it_is_marked(self, system):
    row = {"messages": [*[_SYSTEM] * system, bot("naïve"), *_TURNS]}
    self.use(self._NEEDS_USER, marks=True)
    self.assertEqual(self._answers(self.open(row)), ["naïve", "one", "two "])
    self.use(self._NEEDS_USER)
    self.assertEqual(self._answers(self.open(row)), ["one", "two "])
    with self.assertRaisesRegex(ValueError, "Undefined"):
      self.open({"messages": [bot("Q")]})


class FilesTest(_RowsTest):
  @parameterized.parameters(ChatSource, PreferenceSource)
  def test_bad_rows_are_counted_and_left_out(self, kind):
    good = [{"messages": _TURNS}, _ALPACA]
    if kind is PreferenceSource:
      answers = {"prompt": "a?", "rejected": "Q"}
      good = [answers | {"chosen": x} for x in ("one", "two ")]
    expected = self.open(*good, kind=kind).identity()
    bad = ["{", "[3]", {"text": "a"}, {"messages": [user("a")]}]
    bad += [{**good[0], "images": ["a.png"]}, {**good[1], "tools": "3"}]
    random.Random(0).shuffle(bad)
    rows = [bad[0], good[0], *bad[1:], good[1]]
    with self.assertLogs(conversations.__name__, "INFO") as logs:
      found = self.open(*rows, kind=kind, on_error="skip")
    self.assertEqual(found.identity(), expected)
    self.assertRegex(logs.output[0], "6 bad rows: .*train.jsonl:1: ")
    with self.assertRaisesRegex(ValueError, "train.jsonl:1: "):
      self.open(*rows, kind=kind)
    with self.assertRaisesRegex(ValueError, "none of 0 .*; 6 bad rows: .*:1: "):
      self.open(*bad, kind=kind, on_error="skip")

  def test_epochs_read_the_conversations_once(self):
    rows = {"train": [_ALPACA] * 9, "val": [_ALPACA]}
    for split, some in rows.items():
      tiny_chat.write_rows(self.root / f"{split}.jsonl", *some)
    data = dataclasses.asdict(self.data(sequence_length=64, batch_size=2))
    model, train = {"vocab_size": 400, "max_length": 64}, {"epochs": 2.0}
    config = tiny.llm_config(model=model, data=data, train=train)
    read = mock.Mock(side_effect=conversations.read_messages)
    with mock.patch.object(conversations, "read_messages", read):
      resolved = infer.resolve(config)
      self.assertGreater(resolved.train.steps, 1)
      self.assertEqual(read.call_count, 9)
      tiny.make_task(resolved)
      self.assertEqual(read.call_count, 10)  # and the held-out one
      tiny.make_task(resolved)  # another run may find other files
      self.assertEqual(read.call_count, 20)
