"""Writes sets of tokens; a killed process loses one shard at most."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from array_record.python import array_record_module

from moh_jax.data.shard_writer import OpenShard, ShardSetWriter
from moh_jax.data.text.token_sets import (
  BLOCK,
  DOCUMENTS,
  KIND,
  LENGTHS_DTYPE,
  has_ends,
  token_dtype,
)
from moh_jax.data.text.tokenizer_files import write_tokenizer_files
from moh_jax.data.text.tokenizers import Tokenizer
from moh_jax.files import replacing

_COUNTS = ("documents", "tokens", "text_bytes")


class TokenShard:
  """A shard of tokenized documents that is being written."""

  def __init__(self, shard: OpenShard, tokenizer: Tokenizer):
    self._shard = shard
    self._dtype = token_dtype(tokenizer.vocab_size)
    self._before = [tokenizer.bos_id] if tokenizer.add_bos else []
    self._after = [i for i in (tokenizer.eos_id,) if i is not None]
    # A document needs a token before its text, so that the model predicts the
    # first token of the text too: without a begin, the end token stands in.
    self._before = self._before or self._after
    self._pending: list[np.ndarray] = []
    self._num_pending = 0
    self._lengths: list[int] = []
    self._text_bytes = 0

  def add(self, ids: list[int], text_bytes: int) -> None:
    """Appends a document.

    Args:
      ids: tokens of the document, at least one, without begin and end.
      text_bytes: UTF-8 bytes of its text.
    """
    tokens = np.array(self._before + ids + self._after, self._dtype)
    self._pending.append(tokens)
    self._num_pending += len(tokens)
    self._lengths.append(len(tokens))
    self._text_bytes += text_bytes
    if self._num_pending >= BLOCK:
      tokens = np.concatenate(self._pending)
      whole = len(tokens) // BLOCK * BLOCK
      for start in range(0, whole, BLOCK):
        self._shard.add_record(tokens[start : start + BLOCK].tobytes())
      self._pending = [tokens[whole:]]
      self._num_pending = len(tokens) - whole

  def skip(self, name: str, reason: str, detail: str = "") -> None:
    """Records that the document `name` is left out; see `OpenShard.skip`."""
    self._shard.skip(name, reason, detail)

  def close(self) -> None:
    """Writes the last block, and the record with the documents' lengths."""
    if self._num_pending:
      self._shard.add_record(np.concatenate(self._pending).tobytes())
    lengths = np.array(self._lengths, LENGTHS_DTYPE)
    self._shard.add_record(lengths.tobytes())
    counts = (len(lengths), int(lengths.sum()), self._text_bytes)
    self._shard.notes.update(zip(_COUNTS, counts))


class TokenSetWriter(ShardSetWriter):
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
    super().__init__(
      folder,
      KIND,
      items=num_shards,
      shard_size=1,
      settings={
        "tokenizer": {
          "kind": tokenizer.kind,
          "sha256": tokenizer.sha256,
          "file": tokenizer.file_name,
        },
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
        "eos_id": tokenizer.eos_id,
        "block": BLOCK,
        **settings,
      },
      notes={},
    )
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

  def documents(self) -> int:
    """Number of documents in the whole set.

    Raises:
      ValueError: a shard is missing.
    """
    return sum(entry["documents"] for entry in self.entries())

  def finish(self) -> dict[str, Any]:
    """Writes documents.npy, the tokenizer's file and metadata.json.

    Returns:
      The content of metadata.json.

    Raises:
      ValueError: a shard is missing, or there is no document at all.
    """
    entries = self.entries()
    totals = {name: sum(entry[name] for entry in entries) for name in _COUNTS}
    if not totals["documents"]:
      raise ValueError(f"{self._folder}: the input has no document for it")
    ends = np.zeros(totals["documents"] + 1, np.int64)
    done = 0
    for entry in entries:
      lengths = self._lengths(entry)
      ends[done + 1 : done + 1 + len(lengths)] = lengths
      done += len(lengths)
    np.cumsum(ends, out=ends)
    with replacing(self._folder / DOCUMENTS) as path, path.open("wb") as file:
      np.save(file, ends)
    if self._tokenizer.file_name:
      own = {self._tokenizer.file_name: self._tokenizer.content}
      write_tokenizer_files(self._folder, {**own, **self._tokenizer.files})
    return super().finish(**totals, notes=self._set_notes)

  def _lengths(self, entry: dict[str, Any]) -> np.ndarray:
    """Reads the number of tokens of each document of a shard."""
    path = self._folder / entry["file"]
    reader = array_record_module.ArrayRecordReader(str(path))
    record = reader.read([entry["examples"] - 1])[0]
    reader.close()
    return np.frombuffer(record, LENGTHS_DTYPE)
