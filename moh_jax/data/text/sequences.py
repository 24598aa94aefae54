"""Packed sequences that a text model is trained and evaluated on.

The training stream is endless: each source of text is shuffled anew every
epoch, and the sources alternate by their ratios. Sequence i of the stream
depends on the seed and i alone.
"""

import bisect
import itertools
import logging
import os
import pathlib
import sys
from typing import Any

import grain
import numpy as np

from moh_jax.config.data import TextDataConfig
from moh_jax.data.identity import Identity
from moh_jax.data.shards import METADATA, read_metadata
from moh_jax.data.text.packing import FakeSequences, PackedSource, Sequence
from moh_jax.data.text.stdlib import prepare
from moh_jax.data.text.token_sets import KIND, TokenSet, set_tokenizer
from moh_jax.data.text.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
SPLITS = ("train", "val")
# Integer ratios make the shares exact for any number of sequences.
_PER_PERCENT = 10**6


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


def source_names(data: TextDataConfig) -> tuple[str, ...]:
  """Names of the sources: `data.mix`, or the kind of the only source."""
  return data.mix or (data.source,)


def mixture_shares(data: TextDataConfig, sequences: int) -> dict[str, float]:
  """Share of each source in the first `sequences` training sequences.

  The shares are exact, not expectations, since the order of the sources follows
  from the ratios without randomness.
  """
  counts = Mixture(data.ratios or (100.0,)).counts(sequences)
  names = source_names(data)
  return {name: n / max(sequences, 1) for name, n in zip(names, counts)}


def train_sequences(
  data: TextDataConfig, vocab_size: int, seed: int
) -> grain.MapDataset:
  """Builds the endless training stream.

  Args:
    data: section `data` of the config.
    vocab_size: number of token ids of the model.
    seed: seed of the order.

  Returns:
    A dataset of packed sequences, see `packing.py`.

  Raises:
    FileNotFoundError: a set, or a file of it, is missing.
    ValueError: a set is damaged, shorter than one sequence, does not fit the
      model, or was made with another tokenizer than the others.
  """
  datasets = []
  for index, source in enumerate(_open_sources(data, vocab_size, "train")):
    if not len(source):
      raise ValueError(
        f"{source.token_set.folder}: {source.token_set.num_tokens} tokens are "
        f"fewer than data.sequence_length={data.sequence_length} and one"
      )
    # With one seed, sources of the same length would have the same order.
    own = np.random.SeedSequence((seed, index)).generate_state(1)[0]
    dataset = grain.MapDataset.source(source).seed(int(own))
    datasets.append(dataset.shuffle().repeat())
  if len(datasets) == 1:
    return datasets[0]
  mixture = Mixture(data.ratios)
  return grain.MapDataset.select_from_datasets(datasets, mixture)


class HeldOut:
  """The held-out sequences of all sources, in order.

  The last sequence of each source is padded.

  Attributes:
    text_bytes: UTF-8 bytes of all documents; for "fake", one per token.
    notes: notes of the set; with several sets, the sums of the integers that
      all of them note.
  """

  def __init__(self, data: TextDataConfig, vocab_size: int):
    """Opens the held-out sets.

    Args:
      data: section `data` of the config.
      vocab_size: number of token ids of the model.

    Raises:
      FileNotFoundError: a set, or a file of it, is missing.
      ValueError: a set is damaged, does not fit the model, or was made with
        another tokenizer than the others.
    """
    self._sources = _open_sources(data, vocab_size, "val")
    self._ends = list(itertools.accumulate(map(len, self._sources)))
    self.text_bytes: int = len(self) * data.sequence_length
    self.notes: dict[str, Any] = {}
    if data.source != "fake":
      found = [source.token_set.metadata for source in self._sources]
      self.text_bytes = sum(metadata["text_bytes"] for metadata in found)
      self.notes = _merge([metadata["notes"] for metadata in found])

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> Sequence:
    """Returns a packed sequence, see `packing.py`."""
    if not 0 <= index < len(self):
      raise IndexError(f"index={index} of {len(self)} sequences")
    source = bisect.bisect_right(self._ends, index)
    first = self._ends[source] - len(self._sources[source])
    return self._sources[source][index - first]

  def bytes_of(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the text that sequences [S] int predict."""
    total = 0.0
    for source, end in zip(self._sources, self._ends):
      own = indices - (end - len(source))
      total += source.text_bytes(own[(own >= 0) & (own < len(source))])
    return total


def open_sets(
  data: TextDataConfig, vocab_size: int, split: str
) -> dict[str, TokenSet]:
  """Opens the set of tokens of every source, for one split.

  Args:
    data: section `data` of the config; its source is not "fake".
    vocab_size: number of token ids of the model.
    split: "train" or "val".

  Returns:
    Sets by the name of the source.

  Raises:
    FileNotFoundError: a set, or a file of it, is missing.
    ValueError: a set is damaged, does not fit the model, or was made with
      another tokenizer than another source or the other split.
  """
  described = _describe_sets(data, vocab_size, split)
  return {name: TokenSet(folder) for name, (folder, _) in described.items()}


def identity(data: TextDataConfig, vocab_size: int) -> dict[str, Identity]:
  """What identifies the training data, by the name of the source.

  Raises:
    FileNotFoundError: a set, or a file of it, is missing.
    ValueError: a set is damaged, or does not fit; see `open_sets`.
  """
  if data.source == "fake":
    return {"fake": {"examples": data.fake_examples}}
  sets = open_sets(data, vocab_size, "train")
  return {name: token_set.identity() for name, token_set in sets.items()}


def open_tokenizer(
  data: TextDataConfig, vocab_size: int, split: str = "train"
) -> Tokenizer | None:
  """Loads the tokenizer of the configured text; None for the source "fake".

  Only metadata.json and the tokenizer's file are read; shards may be missing.

  Raises:
    FileNotFoundError: a metadata.json or the tokenizer's file is missing.
    ValueError: one of them is damaged, or the sets fit neither the model nor
      each other, see `open_sets`.
  """
  if data.source == "fake":
    return None
  (folder, metadata), *_ = _describe_sets(data, vocab_size, split).values()
  return set_tokenizer(folder, metadata)


def _describe_sets(
  data: TextDataConfig, vocab_size: int, split: str
) -> dict[str, tuple[pathlib.Path, dict[str, Any]]]:
  """Returns (folder, metadata) of every source for one split, checked."""
  if split not in SPLITS:
    raise ValueError(f"split={split!r} must be one of {SPLITS}")
  root = pathlib.Path(data.path)
  if data.source == "stdlib":
    root = prepare(root, data.tokenizer, vocab_size)
  folders = [root / name for name in data.mix] or [root]
  found = {
    name: (folder / split, describe_set(folder / split))
    for name, folder in zip(source_names(data), folders)
  }
  tokenizers = {f: metadata["tokenizer"] for f, metadata in found.values()}
  for other in SPLITS:
    for folder in folders:
      place = folder / other
      if place not in tokenizers and (place / METADATA).is_file():
        tokenizers[place] = read_metadata(place, KIND)["tokenizer"]
  _check_alike(tokenizers)
  for folder, metadata in found.values():
    if metadata["vocab_size"] > vocab_size:
      raise ValueError(
        f"{folder}: its tokenizer has {metadata['vocab_size']} ids, more than "
        f"model.vocab_size={vocab_size}"
      )
  return found


def _open_sources(
  data: TextDataConfig, vocab_size: int, split: str
) -> list[Any]:
  length, separate = data.sequence_length, data.separate_documents
  if data.source == "fake":
    seed, examples = SPLITS.index(split), data.fake_examples
    fake = FakeSequences(vocab_size, length, examples, separate, seed=seed)
    sources = {"fake": fake}
  else:
    sources = {
      name: PackedSource(token_set, length, separate, keep_rest=split == "val")
      for name, token_set in open_sets(data, vocab_size, split).items()
    }
  for name, source in sources.items():
    _LOG.info(
      "data: %s, %s: %s sequences of %d tokens",
      name,
      split,
      f"{len(source):,}",
      length,
    )
  return list(sources.values())


def describe_set(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the metadata of a token set.

  Raises:
    FileNotFoundError: there is no such set.
    ValueError: its metadata are damaged.
  """
  if not folder.is_dir():
    raise FileNotFoundError(
      f"{folder}: no such directory; `python -m moh_jax tokenize` makes it"
    )
  return read_metadata(folder, KIND)


def _check_alike(tokenizers: dict[os.PathLike, dict[str, str]]):
  """Checks that all folders have the same tokenizer, by its SHA-256."""
  (first, ours), *others = tokenizers.items()
  for folder, theirs in others:
    if theirs["sha256"] != ours["sha256"]:
      raise ValueError(
        f"{folder}: made with a tokenizer {theirs['kind']!r} of sha256 "
        f"{theirs['sha256'][:16]}, {first} with one {ours['kind']!r} of "
        f"{ours['sha256'][:16]}; their ids mean different text"
      )


def _merge(notes: list[dict[str, Any]]) -> dict[str, Any]:
  """Sums the integers that all notes have; a single note stays as it is."""
  if len(notes) == 1:
    return notes[0]
  return {
    key: sum(entry[key] for entry in notes)
    for key, value in notes[0].items()
    if isinstance(value, int) and all(key in entry for entry in notes)
  }
