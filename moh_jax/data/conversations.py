"""Conversations as training data: only the assistant's tokens are trained.

A row is {"messages": [{"role", "content"}, ...]}, ShareGPT's {"conversations":
[{"from", "value"}, ...]} or Alpaca's {"instruction", "input", "output"}. The
model's chat template makes the text, and says which of it is an answer, see
`chat.Template`. A token is trained if any character of it is in an answer.

Sequences hold whole conversations, each a segment of its own, chosen so that
little padding is left. They are made once, when the source is opened, and kept
as arrays of tokens.
"""

import bisect
import collections
import contextlib
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import MissingSplitError
from moh_jax.data.chat import ASSISTANT, Message, Span, Template, check_messages
from moh_jax.data.identity import Identity
from moh_jax.data.input_files import files_by_split
from moh_jax.data.sequences import Sequence, pack
from moh_jax.data.text_files import ROW_SUFFIXES, read_rows
from moh_jax.data.tokenizer_limits import library_errors
from moh_jax.data.tokenizers import (
  JsonTokenizer,
  check_vocabulary,
  load_tokenizer,
)

_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# ShareGPT's names of roles, beside those above.
_SPEAKERS = {"human": "user", "gpt": ASSISTANT}
_FORMS = "'messages', 'conversations' or 'instruction' and 'output'"
_AT_ONCE = 1024  # conversations that are tokenized together
_LOG = logging.getLogger(__name__)


class ChatSource:
  """Source of the packed sequences of conversations.

  Attributes:
    total_bytes: UTF-8 bytes of all answers, without special tokens.
  """

  notes: Mapping[str, Any] = {}

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
    began = time.perf_counter()
    self._tokenizer, self._length = _load(data), data.sequence_length
    check_vocabulary(self._tokenizer, vocab_size, data.tokenizer_path)
    found = list(_tokenized(data, self._tokenizer, split))
    lengths = np.array([len(one.tokens) for one in found])
    fits = lengths <= self._length + 1
    if data.too_long == "skip":
      found = list(itertools.compress(found, fits))
    found = [one.cut(self._length + 1) for one in found]
    kept = [one for one in found if one.trained[1:].any()]
    if not kept:
      raise ValueError(
        f"{data.path}, {split}: none of {len(lengths)} conversations has an "
        f"answer in its first data.sequence_length={self._length} tokens"
      )
    sizes = np.array([len(one.tokens) for one in kept])
    packed = best_fit(sizes, self._length + 1)
    self._firsts = np.cumsum([0, *map(len, packed)])  # of each sequence
    ordered = [kept[i] for i in itertools.chain.from_iterable(packed)]
    self._ends = np.cumsum([0, *(len(one.tokens) for one in ordered)])
    self._tokens = np.concatenate([one.tokens for one in ordered])
    self._trained = np.concatenate([one.trained for one in ordered])
    answers = [self._tokenizer.decode(x.tokens[x.trained]) for x in ordered]
    self._bytes = np.array([len(text.encode()) for text in answers])
    self.total_bytes = int(self._bytes.sum())
    _LOG.info(
      "data: %s, %s: %d conversations in %.1f s; %.1f %% of %d tokens are "
      "trained; longer than a sequence: %d (data.too_long=%s), left out: %d",
      *(data.path, split, len(lengths), time.perf_counter() - began),
      *(100 * self._trained.mean(), len(self._tokens), (~fits).sum()),
      *(data.too_long, len(lengths) - len(kept)),
    )

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, "ChatSource"]:
    """Opens a split; see `__init__`."""
    return {data.source: cls(data, vocab_size, split)}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The vocabulary of the tokenizer; reads no conversation."""
    del names
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

  def __getitem__(self, index: int) -> Sequence:
    ends = self._ends[self._firsts[index] : self._firsts[index + 1] + 1]
    place = slice(ends[0], ends[-1])
    starts = ends[1:-1] - ends[0]
    sequence = pack(self._tokens[place], starts, self._length)
    trained = self._trained[place][1:]
    sequence["weights"][: len(trained)] *= trained
    return sequence

  def text_bytes(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the answers in sequences [S] int."""
    sums = np.cumsum([0, *self._bytes])
    firsts, stops = self._firsts[indices], self._firsts[indices + 1]
    return float((sums[stops] - sums[firsts]).sum())


class _Conversation(NamedTuple):
  """Tokens [n] int32 of a conversation, and which are trained, [n] bool."""

  tokens: np.ndarray
  trained: np.ndarray

  def cut(self, most: int) -> "_Conversation":
    """The first tokens."""
    return _Conversation(self.tokens[:most], self.trained[:most])


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
  """Distributes items to bins by best fit decreasing.

  Args:
    sizes: [n] int, at most `capacity` each.
    capacity: of a bin.

  Returns:
    The items' numbers in each bin, the same in every call.
  """
  bins: list[list[int]] = []
  with_space = collections.defaultdict(list)  # numbers of bins by their space
  spaces: list[int] = []  # those of any bin, in order
  for index in np.argsort(-sizes, kind="stable").tolist():
    place = bisect.bisect_left(spaces, sizes[index])
    space, number = capacity, len(bins)
    if place < len(spaces):
      space = spaces[place]
      number = with_space[space].pop()
      if not with_space[space]:
        del spaces[place]
    else:
      bins.append([])
    bins[number].append(index)
    left = space - int(sizes[index])
    if not with_space[left]:
      bisect.insort(spaces, left)
    with_space[left].append(number)
  return bins


def read_messages(row: Mapping[str, Any]) -> list[Message]:
  """Reads the conversation of a row, in any of the three forms.

  Raises:
    ValueError: it is in none of them, a role is unknown, or there is no answer.
  """
  row = {name: value for name, value in row.items() if value is not None}
  if "messages" in row:
    messages = row["messages"]
  elif isinstance(turns := row.get("conversations"), list):
    messages = [
      {"role": _SPEAKERS.get(str(one.get("from")), one.get("from"))}
      | {"content": one.get("value")}
      if isinstance(one, dict)
      else one
      for one in turns
    ]
  elif {"instruction", "output"} <= row.keys():
    asked = [row["instruction"], row.get("input", "")]
    asked = "\n\n".join(str(text) for text in asked if text)
    messages = [
      {"role": "user", "content": asked},
      {"role": ASSISTANT, "content": row["output"]},
    ]
  else:
    raise ValueError(f"a row must have {_FORMS}, found {sorted(row)}")
  check_messages(messages)
  roles = [message["role"] for message in messages]
  for index, role in enumerate(roles):
    if role not in _ROLES:
      known = *_ROLES, *_SPEAKERS
      raise ValueError(f"message {index}: role {role!r} must be one of {known}")
  if ASSISTANT not in roles:
    raise ValueError(f"no message of {ASSISTANT!r} in roles {roles}")
  # Tables have every field in every row; a template asks whether it is there.
  return [
    {k: x for k, x in message.items() if x is not None or k == "content"}
    for message in messages
  ]


def _load(data: TextDataConfig) -> JsonTokenizer:
  """The tokenizer of a run's conversations.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is none that tells the places of tokens.
  """
  where = f"data.tokenizer_path={data.tokenizer_path!r}"
  if not data.tokenizer_path:
    raise ValueError(
      f"{where} must name a folder with a {JsonTokenizer.file_name} and a chat "
      "template, or train.init_from a checkpoint that has them"
    )
  tokenizer = load_tokenizer(data.tokenizer_path)
  if not isinstance(tokenizer, JsonTokenizer):
    raise ValueError(
      f"{where} must hold a {JsonTokenizer.file_name}: a tokenizer of the kind "
      f"{tokenizer.kind!r} does not tell which text a token is"
    )
  return tokenizer


def _tokenized(
  data: TextDataConfig, tokenizer: JsonTokenizer, split: str
) -> Iterator[_Conversation]:
  """The conversations of a split, in the order of the files."""
  written = _written(data, Template(tokenizer, data.template or None), split)
  while some := list(itertools.islice(written, _AT_ONCE)):
    texts = [text for text, _ in some]
    with library_errors("the tokenizer cannot encode a text"):
      encoded = tokenizer.parser.encode_batch(texts, add_special_tokens=False)
    for one, (_, spans) in zip(encoded, some):
      ids = np.array(one.ids, np.int32)
      yield _Conversation(ids, _in_spans(one.offsets, spans))


def _in_spans(places: list[Span], spans: list[Span]) -> np.ndarray:
  """Which tokens [n] overlap a span, bool.

  Args:
    places: characters (start, stop) of each token.
    spans: of characters, in order.
  """
  firsts, lasts = np.array(places, int).reshape(-1, 2).T
  starts, stops = np.array(spans, int).reshape(-1, 2).T
  # Of each token the first span that ends after its begin.
  following = np.searchsorted(stops, firsts, "right")
  return lasts > np.append(starts, np.iinfo(int).max)[following]


def _written(
  data: TextDataConfig, template: Template, split: str
) -> Iterator[tuple[str, list[Span]]]:
  """The text of each conversation, and the spans of its answers."""
  root = pathlib.Path(data.path)
  files = files_by_split(root, ROW_SUFFIXES)[split]
  if not files:
    raise MissingSplitError(
      f"{root} holds no conversations to {split}: no file such as "
      f"{split}.jsonl, {split}-0.parquet or {split}/0.parquet"
    )
  for place, row in read_rows([os.fspath(root / name) for name in files]):
    with _at(place):
      text, spans = template.answers(read_messages(row))
      text.encode()  # half a surrogate pair is JSON, but no text
    yield text, spans


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
  """Puts the place of a row before the message of an error in it."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{place}: {error}") from error
