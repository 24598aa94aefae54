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
import itertools
import logging
import os
import pathlib
from typing import Any

import numpy as np

from moh_jax.data.identity import Identity
from moh_jax.data.shards import Shards
from moh_jax.data.text.tokenizers import (
  BytesTokenizer,
  Tokenizer,
  read_tokenizer,
)
from moh_jax.files import checksum

KIND = "tokens"
BLOCK = 8192
DOCUMENTS = "documents.npy"
LENGTHS_DTYPE = np.dtype("<u4")
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
  if entry["kind"] == BytesTokenizer.kind:
    return BytesTokenizer()
  file = folder / entry["file"]
  return read_tokenizer(entry["kind"], file, entry["sha256"], "the set")


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
    self._vocab_size = self.metadata["vocab_size"]
    self._dtype = token_dtype(self._vocab_size)
    # The first token and the first record of each shard.
    self._first_tokens = _before(entry["tokens"] for entry in self._entries)
    self._first_records = _before(entry["examples"] for entry in self._entries)
    self.ends = self._open_ends()

  def __getstate__(self) -> dict[str, Any]:
    # Pickling an array that is mapped into memory would copy all of it.
    return {**self.__dict__, "ends": None}

  def __setstate__(self, state: dict[str, Any]):
    self.__dict__.update(state)
    self.ends = self._open_ends()

  def identity(self) -> Identity:
    """Identifies the tokens and their division into documents."""
    return {
      **self._shards.identity(),
      "tokens": self.num_tokens,
      "documents": checksum(self.folder / DOCUMENTS)[0],
    }

  def tokens(self, start: int, stop: int) -> np.ndarray:
    """Reads tokens `start` to `stop` - 1 of the set.

    Returns:
      [stop - start] int32.

    Raises:
      IndexError: the set has no such tokens.
      ValueError: a record is damaged, or an id is not in the vocabulary; the
        message names the shard.
    """
    if not 0 <= start <= stop <= self.num_tokens:
      raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
    result = np.empty(stop - start, np.int32)
    filled = 0
    while filled < len(result):
      part = self._read(start + filled, stop)
      result[filled : filled + len(part)] = part
      filled += len(part)
    return result

  def _read(self, start: int, stop: int) -> np.ndarray:
    """Reads the tokens from `start` on that lie in its block."""
    shard = bisect.bisect_right(self._first_tokens, start) - 1
    block, offset = divmod(start - self._first_tokens[shard], BLOCK)
    record = self._shards.record(self._first_records[shard] + block)
    tokens = self._entries[shard]["tokens"]
    expected = min(BLOCK, tokens - block * BLOCK)
    if len(record) != expected * self._dtype.itemsize:
      raise ValueError(
        f"{self._shards.path(shard)}: block {block} has {len(record)} bytes, "
        f"expected {expected} tokens of {self._dtype.itemsize} bytes"
      )
    part = np.frombuffer(record, self._dtype)[offset : offset + stop - start]
    if part.max() >= self._vocab_size:
      at = int(np.argmax(part >= self._vocab_size))
      raise ValueError(
        f"{self._shards.path(shard)}: token {block * BLOCK + offset + at} is "
        f"{part[at]}, beyond vocab_size={self._vocab_size}"
      )
    return part

  def _open_ends(self) -> np.ndarray:
    path = self.folder / DOCUMENTS
    if not path.is_file():
      raise FileNotFoundError(
        f"{path}: no such file; the command that made the set writes it again"
      )
    try:
      ends = np.load(path, mmap_mode="r")
    except ValueError as error:
      raise ValueError(f"{path}: damaged: {error}") from error
    # A plain array view, since indexing a memmap is slow.
    ends = np.asarray(ends)
    documents = self.metadata["documents"]
    if (
      ends.shape != (documents + 1,)
      or ends.dtype != np.int64
      or (ends[0], ends[-1]) != (0, self.num_tokens)
    ):
      raise ValueError(
        f"{path}: not of the {documents} documents and {self.num_tokens} "
        "tokens of metadata.json"
      )
    return ends


def _before(counts: Any) -> list[int]:
  """For each count, the sum of the counts before it."""
  return list(itertools.accumulate(counts, initial=0))[:-1]
