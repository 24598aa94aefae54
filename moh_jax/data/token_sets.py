"""Sets of tokens (tokenized text) in shards: the format, and random access.

The documents of a set form one long array of tokens. Each is stored as [begin]
ids [end]; tokenizers without these special tokens give the ids alone. The
records of a shard are blocks of `BLOCK` tokens, of which the last is shorter:
little-endian uint16, or uint32 for vocabularies above 65,536. After them comes
one record with the number of tokens of each document, uint32. No document
crosses shards.

The folder also holds the tokenizer's files, documents.npy (int64 [D + 1]: the
index of the first token of each of the D documents, then the number of tokens)
and metadata.json with the fields "tokenizer" (kind, sha256, file),
"vocab_size", "bos_id", "eos_id", "documents", "tokens", "text_bytes" (UTF-8
bytes of the documents; these three also in the entry of each shard) and
"notes".
"""

import bisect
import contextlib
import itertools
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from array_record.python import array_record_module

from moh_jax.data.identity import Identity
from moh_jax.data.shards import OpenShard, Shards, ShardWriter
from moh_jax.data.tokenizers import (
  Tokenizer,
  load_tokenizer,
  write_tokenizer_files,
)
from moh_jax.runtime.files import checksum, replacing

KIND = "tokens"
BLOCK = 8192
DOCUMENTS = "documents.npy"
_LENGTHS_DTYPE = np.dtype("<u4")
_COUNTS = ("documents", "tokens", "text_bytes")
_LOG = logging.getLogger(__name__)


def token_dtype(vocab_size: int) -> np.dtype:
  """Dtype that stores the tokens of a vocabulary: uint16 or uint32."""
  return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def has_ends(folder: pathlib.Path, described: dict[str, Any]) -> bool:
  """Whether begin or end of text stands between documents; warns if not.

  Args:
    folder: folder of a set.
    described: its metadata, or the settings that it is to have.
  """
  found = {described.get("bos_id"), described.get("eos_id")} != {None}
  if not found:
    _LOG.warning(
      "%s: the tokenizer has neither begin nor end of text: documents that are "
      "kept apart (data.separate_documents) begin with a token that is never "
      "predicted, whose bytes bits_per_byte takes to be the mean of all",
      folder,
    )
  return found


def set_tokenizer(folder: pathlib.Path, metadata: dict[str, Any]) -> Tokenizer:
  """Loads the tokenizer that made a set; opens no shard.

  Args:
    folder: folder of the set.
    metadata: content of its metadata.json.

  Raises:
    FileNotFoundError: the tokenizer's file is missing.
    ValueError: the file is not the one that made the set, or an optional
      library is missing.
  """
  entry = metadata["tokenizer"]
  return load_tokenizer(folder / entry["file"], entry["sha256"], "the set")


class TokenSet:
  """Random access to the tokens of a set; picklable and thread-safe.

  Attributes:
    folder: folder of the set.
    metadata: content of metadata.json.
    num_tokens: number of tokens of all documents.
    ends: int64 [D + 1], mapped into memory: 0, then the index after the last
      token of each document.
  """

  def __init__(self, folder: str | os.PathLike):
    """Opens a set.

    Args:
      folder: folder of the set, local or mounted.

    Raises:
      FileNotFoundError: metadata.json, a shard or documents.npy is missing.
      ValueError: one of them is damaged, or they do not belong together.
    """
    self.folder = pathlib.Path(folder)
    self._shards = Shards(folder, KIND)
    self.metadata = self._shards.metadata
    self.num_tokens: int = self.metadata["tokens"]
    self._entries = self.metadata["shards"]
    self._dtype = token_dtype(self.metadata["vocab_size"])
    # The first token and the first record of each shard.
    self._first_tokens, self._first_records = (
      [0, *itertools.accumulate(entry[name] for entry in self._entries)][:-1]
      for name in ("tokens", "examples")
    )
    # A plain array view, since indexing a memmap is slow.
    self.ends = np.asarray(np.load(self.folder / DOCUMENTS, mmap_mode="r"))

  def __reduce__(self) -> tuple:
    # Pickling an array that is mapped into memory would copy all of it.
    return TokenSet, (self.folder,)

  def identity(self) -> Identity:
    """Identifies the tokens and their division into documents."""
    return {
      **self._shards.identity(),
      "tokens": self.num_tokens,
      "documents": checksum(self.folder / DOCUMENTS)[0],
    }

  def tokens(self, start: int, stop: int) -> np.ndarray:
    """Reads tokens `start` to `stop` - 1, of which the set has all.

    Returns:
      [stop - start] int32.

    Raises:
      ValueError: a record is damaged; the message names the shard.
    """
    parts = [np.empty(0, np.int32)]
    while start < stop:
      parts.append(self._read(start, stop))
      start += len(parts[-1])
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")

  def _read(self, start: int, stop: int) -> np.ndarray:
    """Reads the tokens from `start` on that lie in its block."""
    shard = bisect.bisect_right(self._first_tokens, start) - 1
    block, offset = divmod(start - self._first_tokens[shard], BLOCK)
    record = self._shards.record(self._first_records[shard] + block)
    return np.frombuffer(record, self._dtype)[offset : offset + stop - start]


class TokenShard:
  """A shard of tokenized documents that is being written."""

  def __init__(self, shard: OpenShard, tokenizer: Tokenizer):
    self._shard, self.skip = shard, shard.skip
    self._dtype = token_dtype(tokenizer.vocab_size)
    self._after = [i for i in (tokenizer.eos_id,) if i is not None]
    # A document needs a token before its text, so that the model predicts the
    # first token of the text too: without a begin, the end token stands in.
    self._before = [tokenizer.bos_id] if tokenizer.add_bos else self._after
    self._block = BLOCK * self._dtype.itemsize  # bytes
    self._pending = bytearray()
    self._lengths: list[int] = []
    self._text_bytes = 0

  def add(self, ids: list[int], text_bytes: int) -> None:
    """Appends a document.

    Args:
      ids: tokens of the document, at least one, without begin and end.
      text_bytes: UTF-8 bytes of its text.
    """
    tokens = np.array(self._before + ids + self._after, self._dtype)
    self._pending += tokens.tobytes()
    self._lengths.append(len(tokens))
    self._text_bytes += text_bytes
    while len(self._pending) >= self._block:
      self._shard.add_record(bytes(self._pending[: self._block]))
      del self._pending[: self._block]

  def close(self) -> None:
    """Writes the last block, and the record with the documents' lengths."""
    if self._pending:
      self._shard.add_record(bytes(self._pending))
    lengths = np.array(self._lengths, _LENGTHS_DTYPE)
    self._shard.add_record(lengths.tobytes())
    counts = (len(lengths), int(lengths.sum()), self._text_bytes)
    self._shard.notes.update(zip(_COUNTS, counts))


class TokenSetWriter(ShardWriter):
  """Writes a set of tokens with `num_shards` shards; picklable."""

  def __init__(
    self,
    folder: str | os.PathLike,
    tokenizer: Tokenizer,
    *,
    num_shards: int,
    settings: dict[str, Any],
    notes: dict[str, Any],
  ):
    """Starts a set, or continues an interrupted one.

    Args:
      folder: folder of the set; created.
      tokenizer: tokenizer that makes the tokens.
      num_shards: shards of the whole set.
      settings: JSON values that the tokens depend on, beside the tokenizer; a
        set is continued only with equal settings.
      notes: any JSON values, stored in metadata.json under "notes".

    Raises:
      ValueError: the folder holds a set with other settings (they are named),
        or shards of unknown origin.
    """
    self._tokenizer, self._set_notes = tokenizer, notes
    names = {"kind": "kind", "sha256": "sha256", "file": "file_name"}
    entry = {name: getattr(tokenizer, own) for name, own in names.items()}
    settings = {
      "tokenizer": entry,
      "vocab_size": tokenizer.vocab_size,
      "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
      "eos_id": tokenizer.eos_id,
      "block": BLOCK,
      **settings,
    }
    super().__init__(folder, KIND, num_shards, settings)
    has_ends(self._folder, self._settings)  # warns

  @contextlib.contextmanager
  def open(self, shard: int) -> Iterator[TokenShard]:
    """Context that writes one shard; it appears if the context ends normally.

    Raises:
      OSError: the shard cannot be written, for example because the disk is
        full.
    """
    with super().open(shard) as target:
      tokens = TokenShard(target, self._tokenizer)
      yield tokens
      tokens.close()

  def finish(self) -> dict[str, Any]:
    """Writes documents.npy, the tokenizer's file and metadata.json.

    Returns:
      The content of metadata.json.

    Raises:
      ValueError: a shard is missing.
    """
    entries = self.entries()
    totals = {name: sum(entry[name] for entry in entries) for name in _COUNTS}
    lengths = np.concatenate([[0], *map(self._lengths, entries)])
    ends = np.cumsum(lengths, dtype=np.int64)
    with replacing(self._folder / DOCUMENTS) as path, path.open("wb") as file:
      np.save(file, ends)
    beside: dict[str, bytes] = {}
    if name := self._tokenizer.file_name:
      beside = {name: self._tokenizer.content, **self._tokenizer.files}
      write_tokenizer_files(self._folder, beside)
    return super().finish(**totals, notes=self._set_notes)

  def _lengths(self, entry: dict[str, Any]) -> np.ndarray:
    """Reads the number of tokens of each document of a shard."""
    path = self._folder / entry["file"]
    reader = array_record_module.ArrayRecordReader(str(path))
    record = reader.read([entry["examples"] - 1])[0]
    reader.close()
    return np.frombuffer(record, _LENGTHS_DTYPE)
