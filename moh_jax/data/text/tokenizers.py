"""Text to token ids and back: tokenizer.json, SentencePiece models, bytes.

Every kind encodes plain text: no begin or end of text is added, and text that
looks like a special token is text. (A SentencePiece model normalizes as it was
trained to, so its round trip may change spaces and characters.)
"""

import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers as hf

from moh_jax.data.extras import import_llm_extra

KINDS = ("tokenizer_json", "sentencepiece", "bytes")
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
# The first pair of which a tokenizer.json has a token names its begin and end
# of text; where it has one of the two, that is both.
_BEGIN_END = (
  (BEGIN, END),
  ("<s>", "</s>"),
  ("<bos>", "<eos>"),
  ("[BOS]", "[EOS]"),
  ("<|startoftext|>", "<|endoftext|>"),
)


class Tokenizer(Protocol):
  """What data, training and generation need of a tokenizer; picklable.

  Attributes:
    kind: one of `KINDS`.
    file_name: what its file is called, "" where it has none.
    content: that file's bytes.
    sha256: of the content.
    vocab_size: number of ids.
    bos_id: begin of text, or None.
    eos_id: end of text, or None.
  """

  kind: str
  file_name: str
  content: bytes
  sha256: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone."""

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text."""

  def decode(self, ids: Sequence[int]) -> str:
    """The text; special tokens and ids beyond the vocabulary are left out."""


class JsonTokenizer:
  """A tokenizer.json of the library `tokenizers`."""

  kind = "tokenizer_json"
  file_name = "tokenizer.json"

  def __init__(self, content: bytes):
    """Reads the file's content.

    Raises:
      ValueError: it is no tokenizer.json.
    """
    try:
      tokenizer = hf.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no narrower one
      raise ValueError(f"not a tokenizer.json: {error}") from error
    tokenizer.encode_special_tokens = True  # as the text they are
    tokenizer.no_truncation()
    tokenizer.no_padding()
    self._tokenizer = tokenizer
    self.content = content
    self.sha256 = hashlib.sha256(content).hexdigest()
    # Ids may have gaps, so their number is not that of the entries.
    self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    pairs = [tuple(map(tokenizer.token_to_id, pair)) for pair in _BEGIN_END]
    found = [pair for pair in pairs if pair != (None, None)]
    self.bos_id, self.eos_id = _both(*found[0]) if found else (None, None)

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, on several cores."""
    encode = self._tokenizer.encode_batch_fast
    return [e.ids for e in encode(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int]) -> str:
    """The text."""
    return self._tokenizer.decode([int(i) for i in ids])

  def __reduce__(self):
    return JsonTokenizer, (self.content,)


class SentencePieceTokenizer:
  """A tokenizer.model of the library `sentencepiece`."""

  kind = "sentencepiece"
  file_name = "tokenizer.model"

  def __init__(self, content: bytes):
    """Reads the file's content.

    Raises:
      ValueError: it is no SentencePiece model, or the library is missing.
    """
    library = import_llm_extra("sentencepiece", "a SentencePiece model")
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
    """Ids of the text alone."""
    return self._processor.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text."""
    return self._processor.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """The text."""
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    return self._processor.decode(known)

  def __reduce__(self):
    return SentencePieceTokenizer, (self.content,)


class BytesTokenizer:
  """UTF-8 bytes are ids 0 to 255; 256 is begin and end of text."""

  kind = "bytes"
  file_name = ""
  content = b""
  sha256 = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 257
  bos_id = eos_id = 256

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone."""
    return list(text.encode())

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text."""
    return [list(text.encode()) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """The text."""
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def tokenizer_from_bytes(kind: str, content: bytes) -> Tokenizer:
  """Makes a tokenizer of its kind and its file's content.

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
  """Opens a tokenizer.

  Args:
    path: a tokenizer.json, a SentencePiece .model, a folder with a
      tokenizer.json or tokenizer.model, or "bytes".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged or of no known kind, or an optional library is
      missing.
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
  try:
    return tokenizer_from_bytes(kinds[file.suffix], file.read_bytes())
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error


class StreamDecoder:
  """Decodes ids as they come, without half characters.

  What `feed` and `flush` return adds up to `decode` of all ids.
  """

  # A character has at most 4 tokens, but a run of tokens may each end inside
  # one. Text that stays incomplete for longer than this is not UTF-8.
  _MAX_HELD = 16

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ids: list[int] = []  # what was last returned, then what is held back
    self._returned = 0  # ids of these whose text was returned

  def feed(self, token: int) -> str:
    """Takes the next id; returns the text that is now complete, often ""."""
    self._ids.append(int(token))
    text = self._tokenizer.decode(self._ids)
    held = len(self._ids) - self._returned
    if text.endswith("\ufffd") and held < self._MAX_HELD:
      return ""
    return self._take(text)

  def flush(self) -> str:
    """Returns what is held back, with marks for half characters."""
    return self._take(self._tokenizer.decode(self._ids))

  def _take(self, text: str) -> str:
    # Decoding may drop a space at its beginning, so ids are decoded after some
    # whose text is known.
    known = self._tokenizer.decode(self._ids[: self._returned])
    new = text[len(known) :]
    if new:
      self._ids = self._ids[self._returned :]
    self._returned = len(self._ids)
    return new


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
  """Trains a byte-level BPE that encodes any text without loss.

  Args:
    texts: the text.
    vocab_size: entries, among them the 256 bytes, `BEGIN` and `END`; fewer come
      of a text too short for so many.

  Returns:
    The content of a tokenizer.json.

  Raises:
    ValueError: `vocab_size` is too small.
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
  """Lets the one that exists stand for the other."""
  return (
    second if first is None else first,
    first if second is None else second,
  )
