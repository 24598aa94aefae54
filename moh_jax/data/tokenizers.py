"""Tokenizers: tokenizer.json files, SentencePiece models, and plain bytes.

All kinds encode plain text: they add no begin or end of text, and encode text
that looks like a special token as text, unless asked to parse it. A
SentencePiece model normalizes the text as it was trained to, so decoding may
not give the same spaces and characters back.
"""

import functools
import hashlib
import os
import pathlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers as hf

from moh_jax.data.extras import import_extra
from moh_jax.data.tokenizer_files import (
  ADDED_TOKENS,
  BEGIN,
  END,
  GENERATION_CONFIG,
  MOST_BYTES,
  TOKENIZER_CONFIG,
  TOKENIZER_FILES,
  Ids,
  read_files_beside,
  read_json,
  special_ids,
)
from moh_jax.runtime.files import read_bytes

KINDS = ("tokenizer_json", "sentencepiece", "bytes")
_MOST_ENTRIES = 1 << 22  # of a trained vocabulary
_NO_FILES: Mapping[str, bytes] = types.MappingProxyType({})


class TokenizerFileError(ValueError):
  """A tokenizer's own file cannot be used, or its library is missing."""


class Tokenizer(Protocol):
  """Interface of all tokenizers, which are picklable.

  Attributes:
    kind: one of `KINDS`.
    file_name: name of the tokenizer's file, "" for kinds without one.
    content: bytes of that file.
    files: contents of the files beside it by name.
    sha256: SHA-256 of the content, which identifies the tokenizer.
    vocab_size: number of ids.
    bos_id: id of the begin of text, or None.
    eos_id: id of the end of text, which ends documents, or None.
    add_bos: whether texts begin with `bos_id`.
    stop_ids: ids that end a generated text, `eos_id` among them.
  """

  kind: str
  file_name: str
  content: bytes
  files: Mapping[str, bytes]
  sha256: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  add_bos: bool
  stop_ids: tuple[int, ...]

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text, without begin and end of text.

    Args:
      text: to encode.
      parse_special: names of special tokens in the text become these tokens.
    """

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; special tokens and unknown ids are left out."""

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id, None if it has none."""


class JsonTokenizer:
  """Tokenizer of a tokenizer.json file, by the library `tokenizers`."""

  kind = "tokenizer_json"
  file_name = "tokenizer.json"

  def __init__(self, content: bytes, files: Mapping[str, bytes] = _NO_FILES):
    """Parses the content of a tokenizer.json.

    Args:
      content: of the file.
      files: beside it.

    Raises:
      TokenizerFileError: the content is not a tokenizer.json.
      ValueError: one of the files is damaged or names an unknown token.
    """
    self.content, self.files = content, dict(files)
    self._tokenizer = self._parse(special_as_text=True)
    self.sha256 = hashlib.sha256(content).hexdigest()
    # Ids may have gaps, so the largest counts, not the number of entries.
    vocabulary = self._tokenizer.get_vocab()
    self.vocab_size = max(vocabulary.values(), default=-1) + 1
    self.bos_id, self.eos_id, self.add_bos, self.stop_ids = special_ids(
      files, vocabulary.get, self._own_ids()
    )

  def _parse(self, *, special_as_text: bool) -> hf.Tokenizer:
    try:
      tokenizer = hf.Tokenizer.from_str(self.content.decode())
    except Exception as error:  # the library raises bare Exceptions
      raise TokenizerFileError(f"not a tokenizer.json: {error}") from error
    tokenizer.encode_special_tokens = special_as_text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

  def _own_ids(self) -> Ids:
    """The special tokens that the file's post-processor puts around a text."""
    made = self._tokenizer.encode("a", add_special_tokens=True)
    ends = list(zip(made.ids, made.special_tokens_mask))
    first, last = (
      ends[place][0] if ends and ends[place][1] else None for place in (0, -1)
    )
    return first, last if len(ends) > 1 else None

  @functools.cached_property
  def _with_special(self) -> hf.Tokenizer:
    # A second one, since the switch of the library is not thread-safe.
    return self._parse(special_as_text=False)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    used = self._with_special if parse_special else self._tokenizer
    return used.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, computed on several cores."""
    encode = self._tokenizer.encode_batch_fast
    return [e.ids for e in encode(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return self._tokenizer.decode([int(i) for i in ids])

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    return self._tokenizer.id_to_token(token)

  def __reduce__(self):
    return JsonTokenizer, (self.content, self.files)


class SentencePieceTokenizer:
  """Tokenizer of a tokenizer.model file, by the library `sentencepiece`.

  It encodes as SentencePiece does, with a space before the text and after a
  special token ("legacy" in transformers), and has the model's own tokens.
  """

  kind = "sentencepiece"
  file_name = "tokenizer.model"

  def __init__(self, content: bytes, files: Mapping[str, bytes] = _NO_FILES):
    """Parses the content of a tokenizer.model.

    Args:
      content: of the file.
      files: beside it.

    Raises:
      TokenizerFileError: the content is not a SentencePiece model, the files
        add tokens to it or want other spaces, or the library is missing.
      ValueError: one of the files is damaged or names an unknown token.
    """
    try:
      library = import_extra("sentencepiece", "a SentencePiece model")
      self._processor = library.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError) as error:
      what = "not a SentencePiece model: " * isinstance(error, RuntimeError)
      raise TokenizerFileError(f"{what}{error}") from error
    self.content, self.files = content, dict(files)
    self.sha256 = hashlib.sha256(content).hexdigest()
    model = self._processor
    self.vocab_size = model.vocab_size()
    self._special = {
      model.id_to_piece(i): i
      for i in range(self.vocab_size)
      if model.is_control(i) or model.is_unknown(i)
    }
    self._check_files()
    begin, end = (
      i if i >= 0 else None for i in (model.bos_id(), model.eos_id())
    )
    self.bos_id, self.eos_id, self.add_bos, self.stop_ids = special_ids(
      files, self._token_to_id, (begin, end)
    )

  def _check_files(self) -> None:
    """Refuses what the files beside ask for and a model alone does not do."""
    config = read_json(self.files, TOKENIZER_CONFIG)
    added = dict(read_json(self.files, ADDED_TOKENS))
    stripped = False
    for index, token in (config.get("added_tokens_decoder") or {}).items():
      added[token["content"]] = int(index) if index.isdecimal() else -1
      stripped |= token.get("lstrip", False) or token.get("rstrip", False)
    if stripped or not added.items() <= self._special.items():
      what = f"{TOKENIZER_CONFIG} or {ADDED_TOKENS} adds tokens to it"
    elif config.get("legacy") is False:
      what = f"{TOKENIZER_CONFIG}: 'legacy' is false"
    else:
      return
    raise TokenizerFileError(
      f"{what}, which needs a {TOKENIZER_FILES[0]} beside it: "
      "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained("
      "FOLDER) writes one"
    )

  def _token_to_id(self, token: str) -> int | None:
    found = self._processor.piece_to_id(token)
    return found if self._processor.id_to_piece(found) == token else None

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    known = 0 <= token < self.vocab_size
    return self._processor.id_to_piece(token) if known else None

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    if not parse_special:
      return self._processor.encode(text)
    names = sorted(self._special, key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
      special = self._special.get(part)
      ids += self._processor.encode(part) if special is None else [special]
    return ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, computed on several cores."""
    return self._processor.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return self._processor.decode(
      [int(i) for i in ids if 0 <= i < self.vocab_size]
    )

  def __reduce__(self):
    return SentencePieceTokenizer, (self.content, self.files)


class BytesTokenizer:
  """Tokenizer whose ids 0 to 255 are UTF-8 bytes; 256 begins and ends text."""

  kind = "bytes"
  file_name = ""
  content = b""
  files = _NO_FILES
  sha256 = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 257
  bos_id = eos_id = 256
  add_bos, stop_ids = True, (256,)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text; no text names the special token."""
    del parse_special
    return list(text.encode())

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    return [list(text.encode()) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

  def id_to_token(self, token: int) -> None:
    """Returns None: bytes are not text by themselves."""


def prompt_ids(
  tokenizer: Tokenizer,
  text: str,
  *,
  add_bos: bool | None = None,
  parse_special: bool = False,
) -> list[int]:
  """Returns the ids of a text that a model is to write on from.

  Args:
    tokenizer: of the model.
    text: the prompt.
    add_bos: whether it begins with the begin of text; None does what the
      tokenizer says.
    parse_special: names of special tokens in the text become these tokens.
  """
  add_bos = tokenizer.add_bos if add_bos is None else add_bos
  before = (
    [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
  )
  return before + tokenizer.encode(text, parse_special=parse_special)


def check_vocabulary(
  tokenizer: Tokenizer, vocab_size: int, source: str = ""
) -> None:
  """Checks that a model has all ids of a tokenizer.

  Args:
    tokenizer: of the model.
    vocab_size: number of token ids of the model.
    source: where the tokenizer is from, for the message.

  Raises:
    ValueError: it does not; the message says which.
  """
  where = f"{source}: " if source else ""
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"{where}the tokenizer has {tokenizer.vocab_size} ids, more than "
      f"model.vocab_size={vocab_size}"
    )
  if beyond := [i for i in tokenizer.stop_ids if i >= vocab_size]:
    raise ValueError(
      f"{where}{GENERATION_CONFIG}: eos_token_id {beyond[0]} must be below "
      f"model.vocab_size={vocab_size}"
    )


def tokenizer_from_bytes(
  kind: str, content: bytes, files: Mapping[str, bytes] = _NO_FILES
) -> Tokenizer:
  """Makes a tokenizer from the content of its file.

  Args:
    kind: one of `KINDS`.
    content: bytes of the tokenizer's file; b"" for the kind "bytes".
    files: beside it.

  Raises:
    ValueError: the kind is unknown, the content is not of that kind, one of the
      files is damaged, or an optional library is missing.
  """
  if kind == "tokenizer_json":
    return JsonTokenizer(content, files)
  if kind == "sentencepiece":
    return SentencePieceTokenizer(content, files)
  if kind == "bytes":
    return BytesTokenizer()
  raise ValueError(f"tokenizer kind {kind!r} must be one of {KINDS}")


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """Loads a tokenizer from a file, and the files that lie beside it.

  Args:
    path: a tokenizer.json, a SentencePiece .model, a folder that holds a
      tokenizer.json or tokenizer.model, or "bytes".

  Raises:
    FileNotFoundError: there is no such file.
    TokenizerFileError: the file is damaged, or an optional library is missing.
    ValueError: it is of an unknown kind, or a file beside it is damaged.
  """
  if os.fspath(path) == "bytes":
    return BytesTokenizer()
  file = pathlib.Path(path)
  if file.is_dir():
    found = [f for name in TOKENIZER_FILES if (f := file / name).is_file()]
    if not found:
      raise FileNotFoundError(f"{file} holds none of {TOKENIZER_FILES}")
    file = found[0]
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such tokenizer file")
  kinds = {".json": "tokenizer_json", ".model": "sentencepiece"}
  if file.suffix not in kinds:
    raise ValueError(
      f"{file}: a tokenizer file ends in one of {tuple(kinds)}; 'bytes' needs "
      "none"
    )
  return read_tokenizer(kinds[file.suffix], file)


def read_tokenizer(
  kind: str, file: pathlib.Path, sha256: str = "", owner: str = ""
) -> Tokenizer:
  """Reads a tokenizer, and checks that it is the expected one.

  Args:
    kind: one of `KINDS` that has a file.
    file: path of the file.
    sha256: of its content; "" accepts any.
    owner: what was made with that tokenizer, for the message.

  Raises:
    FileNotFoundError: there is no such file.
    TokenizerFileError: the file is damaged, or an optional library is missing.
    ValueError: it is another one, or a file beside it is damaged.
  """
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such tokenizer file")
  try:
    files = read_files_beside(file.parent)
    content = read_bytes(file, MOST_BYTES)
    tokenizer = tokenizer_from_bytes(kind, content, files)
  except ValueError as error:
    raise type(error)(f"{file}: {error}") from error
  if sha256 and tokenizer.sha256 != sha256:
    raise ValueError(
      f"{file} has sha256 {tokenizer.sha256[:16]}, {owner} was made with a "
      f"tokenizer of {sha256[:16]}"
    )
  return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
  """Trains a byte-level BPE tokenizer, which encodes any text without loss.

  Args:
    texts: texts to train on.
    vocab_size: number of ids, among them the 256 bytes, `BEGIN` and `END`; a
      short text gives fewer.

  Returns:
    The content of a tokenizer.json.

  Raises:
    ValueError: `vocab_size` is below 258.
  """
  smallest = 256 + 2
  if vocab_size < smallest:
    raise ValueError(
      f"vocab_size={vocab_size} must be at least {smallest}: the 256 bytes, "
      f"{BEGIN} and {END}"
    )
  if vocab_size > _MOST_ENTRIES:  # the library takes memory for all of them
    raise ValueError(f"vocab_size={vocab_size} must be at most {_MOST_ENTRIES}")
  tokenizer: Any = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[BEGIN, END],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer.to_str().encode()


class StreamDecoder:
  """Decodes ids one by one, and returns whole characters only.

  All that `feed` and `flush` return, joined, is what `decode` of all ids has
  more than `decode` of those before them.
  """

  # A character has at most 4 tokens, but several tokens in a row may each end
  # inside one. Text that is incomplete for longer than this is not UTF-8.
  _MAX_HELD = 16

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
    """Begins a text, or goes on with one.

    Args:
      tokenizer: of the ids.
      before: ids before the first one.
    """
    self._tokenizer = tokenizer
    # Ids whose text was returned, then those that are held back.
    self._ids = list(before)
    self._returned = len(self._ids)  # how many of `_ids` are of the first kind

  def feed(self, token: int) -> str:
    """Takes the next id and returns the text that it completes, often ""."""
    self._ids.append(int(token))
    text = self._tokenizer.decode(self._ids)
    held = len(self._ids) - self._returned
    if text.endswith("\ufffd") and held < self._MAX_HELD:
      return ""
    return self._take(text)

  def flush(self) -> str:
    """Returns the text held back, with U+FFFD for incomplete characters."""
    return self._take(self._tokenizer.decode(self._ids))

  def _take(self, text: str) -> str:
    known = self._tokenizer.decode(self._ids[: self._returned])
    while not text.startswith(known):  # it ended in the middle of a character
      known = known[:-1]
    new = text[len(known) :]
    # Decoding may drop a space at the beginning of a text, so new ids are
    # decoded after earlier ones that begin it, with more than spaces.
    if new.strip(" "):
      self._ids = self._ids[self._returned :]
    self._returned = len(self._ids)
    return new
