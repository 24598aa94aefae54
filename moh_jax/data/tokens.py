"""Sets of tokens: tokenized text in shards, made from files, read at random.

The documents of a set form one long array of tokens. Each is stored as [begin]
ids [end]; tokenizers without these special tokens give the ids alone. The
records of a shard are blocks of `BLOCK` tokens, of which the last is shorter:
little-endian uint16, or uint32 for vocabularies above 65,536. After them comes
one record with the number of tokens of each document, uint32. No document
crosses shards. The folder also holds the tokenizer's files.

A shard has the documents of some files, which depends on the files alone, so a
killed run can continue and ends with the same bytes.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tqdm

from moh_jax.config.registry import SPLITS
from moh_jax.data import files, tokenizers
from moh_jax.data.files import Identity, StrPath
from moh_jax.data.shards import OpenShard, Shards, ShardWriter
from moh_jax.data.tokenizers import Tokenizer

KIND = "tokens"
BLOCK = 8192
SHARD_BYTES = 256 << 20  # of input for one shard, about
_LENGTHS_DTYPE = np.dtype("<u4")
_BATCH = 256  # documents for one call of the tokenizer, on all cores


def token_dtype(vocab_size: int) -> np.dtype:
  """Dtype that stores the tokens of a vocabulary: uint16 or uint32."""
  return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenSet:
  """Random access to the tokens of a set; picklable and thread-safe.

  Attributes:
    folder: folder of the set.
    metadata: content of metadata.json: beside what `shards` writes "tokenizer"
      (kind, sha256, file), "vocab_size", "bos_id", "eos_id", and the sums of
      "documents", "tokens" and "text_bytes" (UTF-8).
    num_tokens: number of tokens of all documents.
    ends: int64 [D + 1]: 0, then the index after the last token of each
      document.
  """

  def __init__(self, folder: StrPath):
    """Opens a set.

    Args:
      folder: folder of the set, local or mounted.

    Raises:
      FileNotFoundError: there is no metadata.json.
      ValueError: it is damaged, or a shard is missing or damaged.
    """
    self.folder = pathlib.Path(folder)
    self._shards = Shards(folder, KIND)
    self.metadata = self._shards.metadata
    self.num_tokens: int = self.metadata["tokens"]
    self._dtype = token_dtype(self.metadata["vocab_size"])
    # The first token and the first record of each shard.
    self._first_tokens, self._first_records = (
      [0, *itertools.accumulate(x[name] for x in self.metadata["shards"])]
      for name in ("tokens", "examples")
    )
    lengths = (self._shards.record(end - 1) for end in self._first_records[1:])
    counts = np.frombuffer(b"".join(lengths), _LENGTHS_DTYPE)
    self.ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

  def __reduce__(self) -> tuple:
    # Opened anew: the ends are 8 bytes a document.
    return TokenSet, (self.folder,)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer that made the set."""
    entry = self.metadata["tokenizer"]
    file, sha256 = self.folder / entry["file"], entry["sha256"]
    return tokenizers.load_tokenizer(file, sha256, "the set")

  def identity(self) -> Identity:
    """Identifies the tokens and their division into documents."""
    return {**self._shards.identity(), "tokens": self.num_tokens}

  def tokens(self, start: int, stop: int) -> np.ndarray:
    """Reads tokens `start` to `stop` - 1, of which the set has all.

    Returns:
      [stop - start] int32.

    Raises:
      ValueError: a record is damaged; the message names the shard.
    """
    parts = [np.empty(0, np.int32)]
    while start < stop:
      shard = bisect.bisect_right(self._first_tokens, start) - 1
      block, offset = divmod(start - self._first_tokens[shard], BLOCK)
      record = self._shards.record(self._first_records[shard] + block)
      part = np.frombuffer(record, self._dtype)[offset : offset + stop - start]
      parts.append(part)
      start += len(part)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")


class TokenShard(OpenShard):
  """A shard of tokenized documents that is being written."""

  def __init__(self, path: pathlib.Path, tokenizer: Tokenizer):
    super().__init__(path)
    self._dtype = token_dtype(tokenizer.vocab_size)
    self._after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    # A document needs a token before its text, so that the model predicts the
    # first token of the text too: without a begin, the end token stands in.
    self._before = [tokenizer.bos_id] if tokenizer.add_bos else self._after
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
    block = BLOCK * self._dtype.itemsize
    while len(self._pending) >= block:
      self.add_record(bytes(self._pending[:block]))
      del self._pending[:block]

  def close(self) -> None:
    """Writes the last block, and the record with the documents' lengths."""
    if self._pending:
      self.add_record(bytes(self._pending))
    lengths = np.array(self._lengths, _LENGTHS_DTYPE)
    self.add_record(lengths.tobytes())
    self.counts = {"documents": len(lengths), "tokens": int(lengths.sum())}
    self.counts["text_bytes"] = self._text_bytes
    super().close()


def token_writer(
  folder: StrPath,
  tokenizer: Tokenizer,
  num_shards: int,
  settings: dict[str, Any],
) -> ShardWriter:
  """Starts a set of tokens, or continues an interrupted one.

  Args:
    folder: folder of the set; created, with the tokenizer's files.
    tokenizer: tokenizer that makes the tokens.
    num_shards: shards of the whole set.
    settings: JSON values that the tokens depend on, beside the tokenizer; a set
      is continued only with equal settings.

  Raises:
    ValueError: the folder holds a set with other settings (they are named).
  """
  names = {"kind": "kind", "sha256": "sha256", "file": "file_name"}
  settings = {
    "tokenizer": {name: getattr(tokenizer, x) for name, x in names.items()},
    "vocab_size": tokenizer.vocab_size,
    "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
    "eos_id": tokenizer.eos_id,
    **settings,
  }
  shard = functools.partial(TokenShard, tokenizer=tokenizer)
  writer = ShardWriter(folder, KIND, num_shards, settings, shard)
  if name := tokenizer.file_name:
    own = {name: tokenizer.content, **tokenizer.files}
    tokenizers.write_tokenizer_files(folder, own)
  return writer


def place_of(text: str) -> float:
  """Where a document is among all, in [0, 1); the first ones are held out.

  It is a hash of the text, so it depends on nothing else: not on the name or
  place of a file, nor on what other documents there are.
  """
  # Not the hash that others select texts by: all would go to one part.
  content = text.encode()
  digest = hashlib.blake2b(content, digest_size=8, person=b"moh_jax").digest()
  return int.from_bytes(digest, "little") / 2**64


def parts_held_out(texts: Iterable[str], share: float) -> dict[float, float]:
  """What to hold out of documents so that it is a share of all their bytes.

  The first ones by `place_of` are held out whole. Where whole ones miss the
  share by more than a tenth of it, so are the last lines of one more. Of
  several documents one is held out at least.

  Args:
    texts: of the documents.
    share: of their bytes, in (0, 1).

  Returns:
    By place the part of a document that is held out; others are not.
  """
  sizes, of_lines = Counter(), set()
  for text in texts:
    place = place_of(text)
    sizes[place] += len(text.encode())
    if "\n" in text.rstrip("\n"):
      of_lines.add(place)
  wanted = left = share * sizes.total()
  parts = {}
  for place in sorted(sizes):
    part = min(1.0, left / max(1, sizes[place]))
    missed = min(part, 1 - part) * sizes[place]
    is_cut = missed > wanted / 10 and place in of_lines
    parts[place] = part if is_cut else round(part)
    left -= sizes[place]
    if left <= 0:
      break
  if len(sizes) > 1 and not any(parts.values()):
    parts[min(sizes)] = 1
  return parts


def cut_tail(text: str, part: float) -> tuple[str, str]:
  """A text without its last lines, and these; one line is not cut.

  Args:
    text: to cut.
    part: of the text that the last lines are, about; all of it where it is 1.
  """
  place = len(text)
  if part == 1:
    place = 0
  elif part:
    place = text.rfind("\n", 0, int(len(text) * (1 - part))) + 1
    place = place or text.find("\n") + 1 or len(text)
  return text[:place], text[place:]


def group_files(
  inputs: Sequence[str], most: int
) -> tuple[list[list[str]], str]:
  """Files in order, in groups of about `most` bytes; no file is cut.

  Returns:
    The groups, and what identifies them, wherever their folder is: names and
    sizes.
  """
  groups: list[list[tuple[str, int]]] = []
  total = most + 1
  for file in files.list_files(inputs):
    total += (size := files.file_size(file))
    if total > most:
      groups.append([])
      total = size
    groups[-1].append((file, size))
  known = [[(os.path.basename(f), n) for f, n in group] for group in groups]
  digest = hashlib.sha256(repr(known).encode()).hexdigest()
  return [[f for f, _ in group] for group in groups], f"sha256 {digest[:16]}"


def tokenize(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: StrPath,
  split: str = "train",
  *,
  held_out: float | None = None,
  field: str = "text",
  shard_bytes: int = SHARD_BYTES,
  on_error: Literal["stop", "skip"] = "stop",
) -> dict[str, dict[str, Any]]:
  """Makes sets OUT/SPLIT, reading the input once; continues killed runs.

  Args:
    inputs: files or patterns, see `files.list_files`.
    tokenizer: tokenizer that makes the tokens.
    out: folder of the splits, local or mounted.
    split: name of the set that all documents go to.
    held_out: makes two sets in its place, "train" and "val", which gets this
      share of the text, see `parts_held_out`; of input for several shards the
      documents whose `place_of` is below it.
    field: field of JSON objects, or column of tables, that holds the text.
    shard_bytes: approximate bytes of input for one shard; no file is cut.
    on_error: "skip" lists lines, rows and files that hold no text in
      OUT/SPLIT/skipped.txt, and goes on; a run that was stopped by one may be
      continued so. A damaged file ends the run in any case.

  Returns:
    The content of metadata.json by split.

  Raises:
    FileNotFoundError: an input is missing.
    OSError: a file cannot be read, or a shard not be written.
    ValueError: an input is damaged, or holds no text and `on_error` is "stop",
      a split gets no document, or `out` holds sets with other settings.
  """
  groups, known = group_files(inputs, shard_bytes)
  settings = {"inputs": known, "field": field, "held_out": held_out}
  writers, parts = {}, {}
  for part in (split,) if held_out is None else SPLITS:
    folder = pathlib.Path(out, part)
    writers[part] = token_writer(folder, tokenizer, len(groups), settings)

  def read(group: int) -> Iterator[tuple[str, str | ValueError]]:
    """The places of documents in files, and their texts."""
    for file in groups[group]:
      for place, text in files.read_documents(file, field):
        if isinstance(text, ValueError) and on_error == "stop":
          raise ValueError(f"{text} (--on-error skip goes on)") from text
        yield place, text

  def part_of(text: str) -> float:
    """The part of a document that is held out."""
    place = place_of(text)
    if len(groups) > 1:
      return float(place < held_out)
    return parts.get(place, 0.0)

  def documents(group: int, shards: dict[str, TokenShard]) -> Iterator[tuple]:
    """The shards that documents go to, their places, and their texts."""
    first = next(iter(shards.values()))
    for place, text in read(group):
      if isinstance(text, ValueError):
        first.skip(str(text))
      elif held_out is None or not text:
        yield first, place, text
      else:
        cut = zip(shards.values(), cut_tail(text, part_of(text)))
        yield from ((shard, place, piece) for shard, piece in cut if piece)

  todo = sorted({i for writer in writers.values() for i in writer.todo()})
  if held_out is not None and len(groups) == 1 and todo:
    texts = (text for _, text in read(0) if isinstance(text, str))
    parts = parts_held_out(texts, held_out)
  for group in tqdm.tqdm(todo, ", ".join(writers), disable=None):
    with contextlib.ExitStack() as stack:
      shards = {
        part: stack.enter_context(writer.open(group))
        for part, writer in writers.items()
      }
      found = documents(group, shards)
      while batch := list(itertools.islice(found, _BATCH)):
        ids = tokenizer.encode_batch([text for *_, text in batch])
        for (shard, place, text), tokens in zip(batch, ids):
          if tokens:
            shard.add(tokens, len(text.encode()))
          else:
            shard.skip(f"{place}: empty")
  return {part: writer.finish() for part, writer in writers.items()}
