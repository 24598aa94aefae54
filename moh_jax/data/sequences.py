"""Packed sequences that a text model is trained and evaluated on.

Sequences have a fixed length N and are cut from sets of tokens. The inputs of
sequence j are tokens j * N to (j + 1) * N - 1 of the set, and its targets are
the tokens that follow each of them, so every token but the first is a target
once. A sequence depends on j alone and is a dict of arrays [N]:

  inputs, targets: int32 token ids.
  segments: int32, numbers the documents in the sequence from 1; 0 is padding.
  positions: int32, counts from 0 within each segment.
  weights: float32, 0 where the target is padding or starts the next document,
    else 1.

If documents are not kept apart, the whole sequence is one segment.

The training stream is endless: each source of text is shuffled anew every
epoch, and the sources alternate by their ratios. Sequence i of the stream
depends on the seed and i alone.
"""

import bisect
import functools
import itertools
import logging
import pathlib
import sys
from collections.abc import Collection
from typing import Any

import grain
import numpy as np

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import SPLITS, get_source, imported
from moh_jax.data.files import Identity
from moh_jax.data.shards import METADATA, read_metadata
from moh_jax.data.sources import FEW
from moh_jax.data.tokenizers import Tokenizer, check_vocabulary
from moh_jax.data.tokens import KIND, TokenSet

Sequence = dict[str, np.ndarray]
_FAKE_TOKENS = 65536  # a usual vocabulary
# Integer ratios make the shares exact for any number of sequences.
_PER_PERCENT = 10**6
_LOG = logging.getLogger(__name__)
# Sources that were opened to count their sequences: the next `Text` takes them.
COUNTED: dict[tuple, dict[str, "PackedSource"]] = {}


class Text:
  """One split of the text of a run.

  As an array it has the sequences of all sources, one source after the other.

  Attributes:
    sources: of sequences, by name; several in the order of `data.mix`.
  """

  def __init__(self, data: TextDataConfig, vocab_size: int, split: str):
    """Opens the configured sources.

    Args:
      data: section `data` of the config.
      vocab_size: number of token ids of the model.
      split: "train" or "val". In the latter the last sequence of each source is
        padded.

    Raises:
      FileNotFoundError: a set, or its metadata.json, is missing.
      ValueError: a set is damaged or lacks a shard, does not fit the model, is
        shorter than one training sequence, or was made with another tokenizer
        than another source or the other split.
    """
    kind = imported(get_source(data).source)
    key = data, vocab_size, split
    self.sources = COUNTED.pop(key, None) or kind.open(*key)
    self._ratios = data.ratios
    self._ends = list(itertools.accumulate(map(len, self.sources.values())))
    for name, source in self.sources.items():
      _LOG.info("data: %s, %s: %d sequences", name, split, len(source))
    if split == "val" and len(self) < FEW:
      said = "%s: only %d sequences are held out, few for a reliable score"
      _LOG.warning(said, data.path or data.source, len(self))

  @functools.cached_property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the text; None of random tokens."""
    return next(iter(self.sources.values())).tokenizer()

  def identity(self) -> dict[str, Identity]:
    """What identifies the text, by the name of the source."""
    return {name: source.identity() for name, source in self.sources.items()}

  def stream(self, seed: int) -> grain.MapDataset:
    """The endless training stream in the order of a seed."""
    datasets = []
    for index, source in enumerate(self.sources.values()):
      # With one seed, sources of the same length would have the same order.
      own = np.random.SeedSequence((seed, index)).generate_state(1)[0]
      dataset = grain.MapDataset.source(source).seed(int(own))
      datasets.append(dataset.shuffle().repeat())
    if len(datasets) == 1:
      return datasets[0]
    mixture = Mixture(self._ratios)
    return grain.MapDataset.select_from_datasets(datasets, mixture)

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> Sequence:
    """Returns a packed sequence."""
    place = bisect.bisect_right(self._ends, index)
    source = list(self.sources.values())[place]
    return source[index - self._ends[place] + len(source)]

  def bytes_of(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the text that sequences [S] int predict."""
    total = 0.0
    for source, end in zip(self.sources.values(), self._ends):
      own = indices - (end - len(source))
      total += source.text_bytes(own[(own >= 0) & (own < len(source))])
    return total


class Mixture(grain.transforms.DatasetSelectionMap):
  """Maps sequence i of a mixture to (source, number of the source's sequence).

  Of the first n sequences each source gives its share, off by at most the
  number of sources. Nothing is random. For example, ratios 75 and 25 take three
  of every four sequences from source 0.
  """

  def __init__(self, ratios: tuple[float, ...]):
    weights = [round(ratio * _PER_PERCENT) for ratio in ratios]
    self._sums = list(itertools.accumulate(weights))

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int) -> tuple[int, int]:
    before, after = self.counts(index), self.counts(index + 1)
    source = next(i for i, (a, b) in enumerate(zip(before, after)) if a != b)
    return source, before[source]

  def counts(self, sequences: int) -> list[int]:
    """How many of the first `sequences` sequences each source gives."""
    # One source is split off after the other. So no count ever falls while
    # `sequences` grows, which floors of the sums of ratios do not guarantee.
    result = []
    for part, whole in zip([0, *self._sums[:-1]][::-1], self._sums[::-1]):
      rest = sequences * part // whole
      result.append(sequences - rest)
      sequences = rest
    return result[::-1]


class PackedSource:
  """Source of the packed sequences of a set of tokens, in order.

  It is the source "tokens". Others of `data.source` have the same methods, of
  which `open` maps names to opened sources.
  """

  def __init__(
    self,
    token_set: TokenSet,
    length: int,
    separate: bool = True,
    keep_rest: bool = False,
  ):
    """Prepares the source without reading tokens.

    Args:
      token_set: set of tokens to cut.
      length: tokens of a sequence, N.
      separate: keep documents apart, as segments of their own.
      keep_rest: whether the tokens after the last whole sequence form a padded
        one.
    """
    self._token_set = token_set
    self._length, self._separate = length, separate
    ends = {token_set.metadata[name] for name in ("bos_id", "eos_id")}
    self._has_ends = ends != {None}  # tokens between documents have no bytes
    targets = max(token_set.num_tokens - 1, 0)
    self._examples = (targets + keep_rest * (length - 1)) // length

  @classmethod
  def folders(
    cls, data: TextDataConfig, vocab_size: int
  ) -> dict[str, pathlib.Path]:
    """Folders with train/ and val/, by the name of the source."""
    root = pathlib.Path(data.path)
    return {name: root / name for name in data.mix} or {data.source: root}

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, "PackedSource"]:
    """Opens the sets of `folders`; see `Text`."""
    folders = cls.folders(data, vocab_size)
    found = {
      folder / part: read_metadata(folder / part, KIND)
      for part in (split, *SPLITS)
      for folder in folders.values()
      if part == split or (folder / part / METADATA).is_file()
    }
    (first, ours), *others = ((k, x["tokenizer"]) for k, x in found.items())
    for place, theirs in others:
      if theirs["sha256"] != ours["sha256"]:
        raise ValueError(f"{place}: made with another tokenizer than {first}")
    sources: dict[str, PackedSource] = {}
    length, separate = data.sequence_length, data.separate_documents
    for name, folder in folders.items():
      token_set = TokenSet(place := folder / split)
      check_vocabulary(token_set.metadata["vocab_size"], vocab_size, place)
      sources[name] = PackedSource(token_set, length, separate, split == "val")
      if not len(sources[name]):
        raise ValueError(
          f"{place}: {token_set.num_tokens} tokens, must be above "
          f"data.sequence_length={length}"
        )
    return sources

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The largest vocabulary of the sets; opens no shard."""
    folders = cls.folders(config.data, 0).values()
    found = [read_metadata(folder / "train", KIND) for folder in folders]
    return {"vocab_size": max(one["vocab_size"] for one in found)}

  def tokenizer(self) -> Tokenizer:
    """The tokenizer that made the set."""
    return self._token_set.tokenizer

  def identity(self) -> Identity:
    """Identifies the tokens and their division into documents."""
    return self._token_set.identity()

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> Sequence:
    start = index * self._length
    stop = min(start + self._length + 1, self._token_set.num_tokens)
    tokens = self._token_set.tokens(start, stop)
    starts = np.empty(0, np.int64)
    if self._separate:
      ends = self._token_set.ends
      first = np.searchsorted(ends, start, "right")
      starts = ends[first : np.searchsorted(ends, stop, "left")] - start
    return pack(tokens, starts, self._length)

  def text_bytes(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the text that sequences [S] int predict; reads no tokens.

    The bytes of the set are divided evenly among its tokens of text. Begin and
    end of text have none, but one of them is predicted in place of the other.
    """
    metadata, total = self._token_set.metadata, self._token_set.num_tokens
    starts = indices * self._length
    stops = np.minimum(starts + self._length + 1, total)
    targets, tokens = stops - starts - 1, total - 1
    if self._separate:
      ends = self._token_set.ends
      targets -= np.searchsorted(ends, stops, "left")
      targets += np.searchsorted(ends, starts, "right")
      tokens = total - metadata["documents"] * self._has_ends
    share = float(targets.sum()) / max(tokens, 1)
    return metadata["text_bytes"] * share


class FakeSequences:
  """Source of random sequences; sequence i is the same in every run.

  A token has one byte.
  """

  def __init__(self, data: TextDataConfig, vocab_size: int, split: str):
    """Prepares a split, which has random numbers of its own; see `Text`."""
    self._vocab_size, self._length = vocab_size, data.sequence_length
    self._separate, self._seed = data.separate_documents, SPLITS.index(split)
    self._examples = data.fake_examples

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, "FakeSequences"]:
    """Makes a split."""
    return {data.source: cls(data, vocab_size, split)}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """A usual vocabulary."""
    return {"vocab_size": _FAKE_TOKENS}

  def tokenizer(self) -> None:
    """None: random tokens are no text."""

  def identity(self) -> Identity:
    """The number of the sequences, which are the same in every run."""
    return {"examples": len(self)}

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> Sequence:
    rng = np.random.default_rng((self._seed, index))
    count = self._length + 1
    tokens = rng.integers(0, self._vocab_size, count, np.int32)
    # On average three documents start in a sequence.
    starts = np.flatnonzero(rng.random(count) < 3 / count)
    starts = starts[starts > 0] if self._separate else starts[:0]
    return pack(tokens, starts, self._length)

  def text_bytes(self, indices: np.ndarray) -> float:
    """One byte a token of some sequences."""
    return float(len(indices) * self._length)


def pack(tokens: np.ndarray, starts: np.ndarray, length: int) -> Sequence:
  """Makes one packed sequence, padded to `length`.

  Args:
    tokens: [n + 1] int32 with n <= `length`, the inputs and the token after
      them.
    starts: [S] int, increasing, in [1, n]: indices where the documents after
      the first start.
    length: tokens of a sequence, N.
  """
  count = len(tokens) - 1
  begins = np.zeros(count + 1, np.int32)
  begins[starts] = 1
  piece = np.cumsum(begins[:count], dtype=np.int32)  # from 0
  origins = np.concatenate([[0], starts]).astype(np.int32)
  result: dict[str, Any] = {
    "inputs": tokens[:-1],
    "targets": tokens[1:],
    "segments": piece + 1,
    "positions": np.arange(count, dtype=np.int32) - origins[piece],
    "weights": (1 - begins[1:]).astype(np.float32),
  }
  if count == length:
    return result
  return {
    name: np.pad(values, (0, length - count)) for name, values in result.items()
  }
