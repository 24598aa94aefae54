"""Tokenizers: tokenizer.json files, SentencePiece models, and plain bytes.

All kinds encode plain text: they add no begin or end of text, and encode text
that looks like a special token as text. A SentencePiece model normalizes the
text as it was trained to, so decoding may not give the same spaces and
characters back.
"""

import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers as hf

from moh_jax.data.extras import import_extra

KINDS = ("tokenizer_json", "sentencepiece", "bytes")
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
# Names of the begin and end of text in a tokenizer.json. The first pair with a
# known token is used; a token without its counterpart serves as both.
_BEGIN_END = (
  (BEGIN, END),
  ("<s>", "</s>"),
  ("<bos>", "<eos>"),
  ("[BOS]", "[EOS]"),
  ("<|startoftext|>", "<|endoftext|>"),
)


class Tokenizer(Protocol):
  """Interface of all tokenizers, which are picklable.

  Attributes:
    kind: one of `KINDS`.
    file_name: name of the tokenizer's file, "" for kinds without one.
    content: bytes of that file.
    sha256: SHA-256 of the content, which identifies the tokenizer.
    vocab_size: number of ids.
    bos_id: id of the begin of text, or None.
    eos_id: id of the end of text, or None.
  """

  kind: str
  file_name: str
  content: bytes
  sha256: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without begin and end of text."""

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; special tokens and unknown ids are left out."""


class JsonTokenizer:
  """Tokenizer of a tokenizer.json file, by the library `tokenizers`."""

  kind = "tokenizer_json"
  file_name = "tokenizer.json"

  def __init__(self, content: bytes):
    """Parses the content of a tokenizer.json.

    Raises:
      ValueError: the content is not a tokenizer.json.
    """
    try:
      tokenizer = hf.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
      raise ValueError(f"not a tokenizer.json: {error}") from error
    tokenizer.encode_special_tokens = True  # encodes their names as text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    self._tokenizer = tokenizer
    self.content = content
    self.sha256 = hashlib.sha256(content).hexdigest()
    # Ids may have gaps, so the largest counts, not the number of entries.
    self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    pairs = [tuple(map(tokenizer.token_to_id, pair)) for pair in _BEGIN_END]
    found = [pair for pair in pairs if pair != (None, None)]
    self.bos_id, self.eos_id = _both(*found[0]) if found else (None, None)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, computed on several cores."""
    encode = self._tokenizer.encode_batch_fast
    return [e.ids for e in encode(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return self._tokenizer.decode([int(i) for i in ids])

  def __reduce__(self):
    return JsonTokenizer, (self.content,)


class SentencePieceTokenizer:
  """Tokenizer of a tokenizer.model file, by the library `sentencepiece`."""

  kind = "sentencepiece"
  file_name = "tokenizer.model"

  def __init__(self, content: bytes):
    """Parses the content of a tokenizer.model.

    Raises:
      ValueError: the content is not a SentencePiece model, or the library is
        missing.
    """
    library = import_extra("sentencepiece", "a SentencePiece model")
    try:
      self._processor = library.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
      raise ValueError(f"not a SentencePiece model: {error}") from error
    self.content = content
    self.sha256 = hashlib.sha256(content).hexdigest()
    self.vocab_size = self._processor.vocab_size()
    ids = (self._processor.bos_id(), self._processor.eos_id())
    self.bos_id, self.eos_id = _both(*(i if i >= 0 else None for i in ids))

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return self._processor.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    return self._processor.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    return self._processor.decode(known)

  def __reduce__(self):
    return SentencePieceTokenizer, (self.content,)


class BytesTokenizer:
  """Tokenizer whose ids 0 to 255 are UTF-8 bytes; 256 begins and ends text."""

  kind = "bytes"
  file_name = ""
  content = b""
  sha256 = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 257
  bos_id = eos_id = 256

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return list(text.encode())

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    return [list(text.encode()) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def tokenizer_from_bytes(kind: str, content: bytes) -> Tokenizer:
  """Makes a tokenizer from the content of its file.

  Args:
    kind: one of `KINDS`.
    content: bytes of the tokenizer's file; b"" for the kind "bytes".

  Raises:
    ValueError: the kind is unknown, the content is not of that kind, or an
      optional library is missing.
  """
  if kind == "tokenizer_json":
    return JsonTokenizer(content)
  if kind == "sentencepiece":
    return SentencePieceTokenizer(content)
  if kind == "bytes":
    return BytesTokenizer()
  raise ValueError(f"tokenizer kind {kind!r} must be one of {KINDS}")


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """Loads a tokenizer from a file.

  Args:
    path: a tokenizer.json, a SentencePiece .model, a folder that holds a
      tokenizer.json or tokenizer.model, or "bytes".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is damaged or of an unknown kind, or an optional
      library is missing.
  """
  if os.fspath(path) == "bytes":
    return BytesTokenizer()
  file = pathlib.Path(path)
  if file.is_dir():
    names = (JsonTokenizer.file_name, SentencePieceTokenizer.file_name)
    found = [file / name for name in names if (file / name).is_file()]
    if not found:
      raise FileNotFoundError(f"{file} holds none of {names}")
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
  """Reads a tokenizer's file, and checks that it is the expected one.

  Args:
    kind: one of `KINDS` that has a file.
    file: path of the file.
    sha256: of its content; "" accepts any.
    owner: what was made with that tokenizer, for the message.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is damaged or another one, or an optional library is
      missing.
  """
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such tokenizer file")
  try:
    tokenizer = tokenizer_from_bytes(kind, file.read_bytes())
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  if sha256 and tokenizer.sha256 != sha256:
    raise ValueError(
      f"{file} has sha256 {tokenizer.sha256[:16]}, {owner} was made with a "
      f"tokenizer of {sha256[:16]}"
    )
  return tokenizer


class StreamDecoder:
  """Decodes ids one by one, and returns whole characters only.

  All that `feed` and `flush` return, joined, is `decode` of all ids.
  """

  # A character has at most 4 tokens, but several tokens in a row may each end
  # inside one. Text that is incomplete for longer than this is not UTF-8.
  _MAX_HELD = 16

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    # The ids whose text was returned last, then those that are held back.
    self._ids: list[int] = []
    self._returned = 0  # how many of `_ids` are of the first kind

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
    # Decoding may drop a space at the beginning of the text, so new ids are
    # decoded together with some earlier ones, whose text is then removed.
    known = self._tokenizer.decode(self._ids[: self._returned])
    new = text[len(known) :]
    if new:
      self._ids = self._ids[self._returned :]
    self._returned = len(self._ids)
    return new


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


def _both(first: int | None, second: int | None) -> tuple[int | None, ...]:
  """Replaces a missing id by the other of the pair."""
  return (
    second if first is None else first,
    first if second is None else second,
  )
