"""Conversations as training data: only the assistant's tokens are trained.

A row is {"messages": [{"role", "content"}, ...]}, ShareGPT's {"conversations":
[{"from", "value"}, ...]} or Alpaca's {"instruction", "input", "output"}, with
"tools" and more. The model's chat template makes the text, and says which of it
is an answer, see `chat.Template`. A token is trained if any character of it is
in an answer.

For preference a row has two conversations, {"prompt", "chosen", "rejected"} as
TRL takes them: answers, or messages that end with one.

Sequences hold whole conversations, each a segment of its own, chosen so that
little padding is left. They are made once, when the source is opened, and kept
as arrays of tokens.
"""

import bisect
import itertools
import logging
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import MissingSplitError
from moh_jax.data import chat, files, sequences, tokenizers
from moh_jax.data.chat import ASSISTANT, Message, Span
from moh_jax.data.files import Identity
from moh_jax.data.tokenizers import JsonTokenizer
from moh_jax.runtime.files import check_json, parse_json

_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# ShareGPT's names of roles.
_SPEAKERS = {**dict(zip(_ROLES, _ROLES)), "human": "user", "gpt": ASSISTANT}
_FORMS = "'messages', 'conversations' or 'instruction' and 'output'"
_AT_ONCE = 1024  # conversations that are tokenized together
_LOG = logging.getLogger(__name__)


class ChatSource:
  """Source of the packed sequences of conversations."""

  def __init__(self, data: TextDataConfig, vocab_size: int, split: str):
    """Reads, writes out, tokenizes and packs all conversations of a split.

    Args:
      data: section `data` of the config.
      vocab_size: number of token ids of the model.
      split: "train" or "val".

    Raises:
      FileNotFoundError: there are no files of the split, or no tokenizer.
      ValueError: a row is no conversation, or the template cannot write it (the
        message names file and line); the tokenizer does not fit the model, has
        no template or tells no places of tokens; or nothing is left to train.
    """
    self._tokenizer, self._length = _load(data), data.sequence_length
    ids = self._tokenizer.vocab_size
    tokenizers.check_vocabulary(ids, vocab_size, data.tokenizer_path)
    self._split = split
    self._bad: list[ValueError] = []  # rows that are left out
    capacity = self._length + 1
    found, too_long, kept = 0, 0, []
    for row in self._tokenized(data):
      found += 1
      if _size(row) > capacity:
        too_long += 1
        most = capacity // len(row) if data.too_long == "cut" else 0
        row = [_Conversation(x.tokens[:most], x.trained[:most]) for x in row]
      if all(one.trained[1:].any() for one in row):
        kept.append(row)
    bad = "".join(f"; {len(self._bad)} bad rows: {x}" for x in self._bad[:1])
    if not kept:
      raise ValueError(
        f"{data.path}, {split}: none of {found} conversations has an answer in "
        f"its first data.sequence_length={self._length} tokens{bad}"
      )
    packed = self._pack(kept)
    self._firsts = np.cumsum([0, *map(len, packed)])  # of each sequence
    ordered = list(itertools.chain.from_iterable(packed))
    self._ends = np.cumsum([0, *(len(one.tokens) for one in ordered)])
    self._tokens = np.concatenate([one.tokens for one in ordered])
    self._trained = np.concatenate([one.trained for one in ordered])
    answers = [self._tokenizer.decode(x.tokens[x.trained]) for x in ordered]
    self._bytes = np.array([len(text.encode()) for text in answers])
    _LOG.info(
      "data: %s, %s: %d conversations; %.1f %% of %d tokens are trained; "
      "longer than a sequence: %d (data.too_long=%s), left out: %d%s",
      *(data.path, split, found, 100 * self._trained.mean()),
      *(len(self._tokens), too_long, data.too_long, found - len(kept), bad),
    )

  def _read(self, row: Mapping[str, Any]) -> list[list[Message]]:
    """The conversations of a row."""
    return [read_messages(row)]

  def _tokenized(self, data: TextDataConfig) -> Iterator["_Tokenized"]:
    """The conversations of each row of a split, in the order of the files."""
    written = self._written(data)
    while rows := list(itertools.islice(written, _AT_ONCE)):
      texts = [text for row in rows for text, _ in row]
      parser = self._tokenizer.parser
      encoded = iter(parser.encode_batch(texts, add_special_tokens=False))
      for row in rows:
        yield [
          _Conversation(np.array(x.ids, np.int32), _in_spans(x.offsets, spans))
          for (_, spans), x in zip(row, encoded)
        ]

  def _written(self, data: TextDataConfig) -> Iterator[list[tuple]]:
    """Of each row's conversations the texts, and the spans of the answers."""
    template = chat.Template(self._tokenizer, data.template)
    root, split = pathlib.Path(data.path), self._split
    names = files.files_by_split(root, files.ROW_SUFFIXES)[split]
    if not names:
      raise MissingSplitError(
        f"{root} holds no conversations to {split}, such as {split}.jsonl"
      )
    rows = [files.read_rows(os.fspath(root / name)) for name in names]
    for place, row in itertools.chain(*rows):
      try:
        if isinstance(row, files.BadTextError):
          raise row
        options = template_options(row)
        yield [template.answers(one, **options) for one in self._read(row)]
      except files.MissingLibraryError:
        raise
      except ValueError as error:
        named = error if error is row else ValueError(f"{place}: {error}")
        if data.on_error == "stop":
          raise ValueError(f"{named} (data.on_error=skip goes on)") from error
        self._bad.append(named)

  def _pack(self, rows: list["_Tokenized"]) -> list["_Tokenized"]:
    """The conversations of every sequence."""
    packed = best_fit(np.array(list(map(_size, rows))), self._length + 1)
    return [[one for i in some for one in rows[i]] for some in packed]

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, "ChatSource"]:
    """Opens a split; see `__init__`."""
    return {data.source: cls(data, vocab_size, split)}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The vocabulary of the tokenizer; reads no conversation."""
    return {"vocab_size": _load(config.data).vocab_size}

  def tokenizer(self) -> JsonTokenizer:
    """The tokenizer, with the template beside it."""
    return self._tokenizer

  def identity(self) -> Identity:
    """Identifies the tokens, which of them are trained, and their order."""
    state = xxhash.xxh3_128()
    for array in (self._tokens, self._trained, self._ends, self._firsts):
      state.update(np.ascontiguousarray(array))
    return {
      "examples": len(self),
      "conversations": len(self._bytes),
      "tokens": len(self._tokens),
      "fingerprint": state.hexdigest(),
    }

  def __len__(self) -> int:
    return len(self._firsts) - 1

  def __getitem__(self, index: int) -> sequences.Sequence:
    ends = self._ends[self._firsts[index] : self._firsts[index + 1] + 1]
    place = slice(ends[0], ends[-1])
    starts = ends[1:-1] - ends[0]
    sequence = sequences.pack(self._tokens[place], starts, self._length)
    trained = self._trained[place][1:]
    sequence["weights"][: len(trained)] *= trained
    return sequence

  def text_bytes(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the answers in sequences [S] int."""
    sums = np.cumsum([0, *self._bytes])
    firsts, stops = self._firsts[indices], self._firsts[indices + 1]
    return float((sums[stops] - sums[firsts]).sum())


class PreferenceSource(ChatSource):
  """Source of pairs of conversations, a better one and a worse one.

  A sequence has both, in this order. Held out are the better ones alone, as
  conversations.
  """

  def _read(self, row: Mapping[str, Any]) -> list[list[Message]]:
    pair = read_pair(row)
    return pair if self._split == "train" else pair[:1]

  def _pack(self, rows: list["_Tokenized"]) -> list["_Tokenized"]:
    return rows if self._split == "train" else super()._pack(rows)


class _Conversation(NamedTuple):
  """Tokens [n] int32 of a conversation, and which are trained, [n] bool."""

  tokens: np.ndarray
  trained: np.ndarray


_Tokenized = list[_Conversation]


def _size(row: _Tokenized) -> int:
  return sum(len(one.tokens) for one in row)


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
  """Distributes items to bins by best fit decreasing.

  Args:
    sizes: [n] int, at most `capacity` each.
    capacity: of a bin.

  Returns:
    The items' numbers in each bin, the same in every call.
  """
  bins: list[list[int]] = []
  # Space of each bin, latest changes first where it is equal, and its number.
  spaces: list[tuple[int, int, int]] = []
  least = sizes.min(initial=capacity)  # fuller bins are done
  for change, index in enumerate(np.argsort(-sizes, kind="stable").tolist()):
    size = int(sizes[index])
    place = bisect.bisect_left(spaces, (size,))
    if place < len(spaces):
      space, _, number = spaces.pop(place)
    else:
      space, number = capacity, len(bins)
      bins.append([])
    bins[number].append(index)
    if space - size >= least:
      bisect.insort(spaces, (space - size, -change, number))
  return bins


class _Row(msgspec.Struct):
  """Fields of a row that are read here, beside "messages"."""

  conversations: list[dict] | None = None
  instruction: str | None = None
  input: str | None = None
  system: str | None = None
  history: list[tuple[str, str]] | None = None


class _Pair(_Row, kw_only=True):
  chosen: str | list[dict]
  rejected: str | list[dict]
  prompt: str | list[dict] | None = None


def read_messages(row: Mapping[str, Any]) -> list[Message]:
  """Reads the conversation of a row, in any of the three forms.

  Raises:
    ValueError: it is in none of them, a role is unknown, there is no answer, or
      a question is given twice.
  """
  check_json(row, _Row)
  row = {name: value for name, value in row.items() if value is not None}
  if "messages" in row:
    messages = row["messages"]
  elif "conversations" in row:
    messages = [_said(i, turn) for i, turn in enumerate(row["conversations"])]
  elif {"instruction", "output"} <= row.keys():
    asked = filter(None, [row["instruction"], row.get("input")])
    messages = _asked("\n\n".join(asked), row.pop("history", []))
    messages.append({"role": ASSISTANT, "content": row["output"]})
  else:
    raise ValueError(f"a row must have {_FORMS}, found {sorted(row)}")
  if row.get("history"):
    raise ValueError("'history' must be beside a question that is a text")
  chat.check_messages(messages)
  messages = files.without_nulls(messages)
  if row.get("system"):
    if messages[0]["role"] in _ROLES[:2]:
      raise ValueError("'system' is given twice, the second time as a message")
    messages.insert(0, {"role": "system", "content": row["system"]})
  roles = [message["role"] for message in messages]
  for i, message in enumerate(messages):
    if (role := message["role"]) not in _ROLES:
      raise ValueError(f"message {i}: role {role!r} must be one of {_ROLES}")
    if not message.keys() & {"content", "tool_calls"}:
      raise ValueError(f"message {i}: 'content' or 'value' is missing")
  if ASSISTANT not in roles:
    raise ValueError(f"no message of {ASSISTANT!r} in roles {roles}")
  return messages


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
  """What a row gives the template beside messages: tools, keyword arguments.

  Raises:
    ValueError: it is no list of objects, or no object, nor the JSON of one.
  """
  found = {name: row[name] for name in chat.FIELDS if row.get(name)}
  for name, kind in (("tools", list[dict]), ("chat_template_kwargs", dict)):
    value = row.get(name) or kind()
    reads = parse_json if isinstance(value, str) else check_json
    value = reads(value, kind | None, name)
    found |= {name: value or None} if name == "tools" else value or {}
  return found


def _said(index: int, turn: Mapping[str, Any]) -> Message:
  """A turn of ShareGPT as a message."""
  said, known = turn.get("from"), tuple(_SPEAKERS)
  if said not in known:
    raise ValueError(f"message {index}: from={said!r} must be one of {known}")
  others = {k: x for k, x in turn.items() if k not in ("from", "value")}
  return {"role": _SPEAKERS[said], "content": turn.get("value"), **others}


def _asked(question: str, history: Iterable[Sequence[str]]) -> list[Message]:
  """A question after what was asked and answered before."""
  texts = [*itertools.chain(*history), question]
  roles = itertools.cycle(("user", ASSISTANT))
  return [{"role": role, "content": text} for role, text in zip(roles, texts)]


def read_pair(row: Mapping[str, Any]) -> list[list[Message]]:
  """Reads the better and the worse conversation of a row.

  Raises:
    ValueError: one is missing, both are equal, they answer different questions,
      or one is no conversation.
  """
  check_json(row, _Pair)
  row = {name: value for name, value in row.items() if value is not None}
  asked = row.get("prompt", [])
  if isinstance(asked, str):
    asked = _asked(asked, row.pop("history", []))
  pair = []
  for name in ("chosen", "rejected"):
    said = row[name]
    if isinstance(said, str):
      said = [{"role": ASSISTANT, "content": said}]
    asked, said = map(files.without_nulls, (asked, said))
    # A whole conversation has the question that may stand beside it.
    starts = range(len(said) - len(asked) + 1)
    whole = any(said[i : i + len(asked)] == asked for i in starts)
    messages = said if whole else asked + said
    pair.append(read_messages({**row, "messages": messages}))
    if asked and not whole and (not said or said[0]["role"] != ASSISTANT):
      raise ValueError(f"'prompt' must be the question in {name!r}")
  for name, messages in zip(("chosen", "rejected"), pair):
    if messages[-1]["role"] != ASSISTANT or len(messages) < 2:
      raise ValueError(f"{name!r} must be the answer to a question ('prompt')")
  both = itertools.zip_longest(*pair, fillvalue={})
  first = next((two for two in both if two[0] != two[1]), [{}])
  if any(message.get("role") != ASSISTANT for message in first):
    raise ValueError("answers must differ, and be answers to one question")
  return pair


def _load(data: TextDataConfig) -> JsonTokenizer:
  """The tokenizer of a run's conversations.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is none that tells the places of tokens.
  """
  where = f"data.tokenizer_path={data.tokenizer_path!r}"
  if not data.tokenizer_path:
    raise ValueError(
      f"{where} must name a folder with a chat template, or train.init_from"
    )
  if not os.path.isdir(data.path):
    raise FileNotFoundError(
      f"data.path={data.path!r}: no such folder; `python -m "
      f"docs.examples.docstrings {data.path}` writes one to try"
    )
  tokenizer = tokenizers.load_tokenizer(data.tokenizer_path)
  if not isinstance(tokenizer, JsonTokenizer):
    # Others do not tell which text a token is.
    raise ValueError(f"{where} must have a tokenizer.json")
  names = chat.template_names(tokenizer)
  if data.template == chat.CHATML and data.template not in names:
    files = {**tokenizer.files, **chat.chatml_files()}
    return JsonTokenizer(tokenizer.content, files)
  return tokenizer


def _in_spans(places: list[Span], spans: list[Span]) -> np.ndarray:
  """Which tokens [n] overlap a span, bool.

  Args:
    places: characters (start, stop) of each token.
    spans: of characters, in order.
  """
  firsts, lasts = np.array(places, int).reshape(-1, 2).T
  # Without the spaces around it (`trim_offsets`), a token of spaces is nowhere.
  ahead = np.minimum(np.append(0, lasts[:-1]), firsts)
  firsts = np.where(firsts == lasts, ahead, firsts)
  starts, stops = np.array(spans, int).reshape(-1, 2).T
  # Of each token the first span that ends after its begin.
  following = np.searchsorted(stops, firsts, "right")
  return lasts > np.append(starts, np.iinfo(int).max)[following]
