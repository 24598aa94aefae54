"""What text models are trained and scored on, as the config says.

The training stream is one endless sequence of packed sequences: each source is
shuffled anew every epoch, and sources take turns by their ratios. Element i is
a pure function of the seed and i.
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

from moh_jax.config.text import TextDataConfig
from moh_jax.data.shards import METADATA, read_metadata
from moh_jax.data.text.packing import FakeSequences, PackedSource, Sequence
from moh_jax.data.text.stdlib import prepare
from moh_jax.data.text.token_sets import KIND, TokenSet, read_tokenizer
from moh_jax.data.text.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
SPLITS = ("train", "val")
# Ratios become integers, so that shares are exact for any number of sequences.
_PER_PERCENT = 10**6


class Mixture(grain.transforms.DatasetSelectionMap):
  """Whose turn it is: source and number of its sequence, for each sequence.

  Among the first n sequences, every source has its share of them to within the
  number of sources.
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
    """How many of the first sequences each source gives."""
    # Splitting off one source after the other keeps every count from falling
    # as `sequences` grows; floors of the sums of ratios would not.
    result = []
    for part, whole in zip([0, *self._sums[:-1]][::-1], self._sums[::-1]):
      rest = sequences * part // whole
      result.append(sequences - rest)
      sequences = rest
    return result[::-1]


def source_names(data: TextDataConfig) -> tuple[str, ...]:
  """The sources: `data.mix`, or the kind of the only one."""
  return data.mix or (data.source,)


def drawn_shares(data: TextDataConfig, sequences: int) -> dict[str, float]:
  """The share of each source among the first sequences of the stream.

  Whose turn it is follows from the ratios alone, with nothing random about it,
  so these are the shares drawn, not those expected.
  """
  counts = Mixture(data.ratios or (100.0,)).counts(sequences)
  names = source_names(data)
  return {name: n / max(sequences, 1) for name, n in zip(names, counts)}


def train_sequences(
  data: TextDataConfig, vocab_size: int, seed: int
) -> grain.MapDataset:
  """The endless training stream.

  Args:
    data: the section.
    vocab_size: of the model.
    seed: of the order.

  Returns:
    A dataset of packed sequences (`packing.py`).

  Raises:
    FileNotFoundError: a set, or a file of it, is missing.
    ValueError: a set is damaged, shorter than one sequence, does not fit the
      model, or has another tokenizer than the others.
  """
  datasets = []
  for index, source in enumerate(_open_sources(data, vocab_size, "train")):
    if not len(source):
      raise ValueError(
        f"{source.token_set.folder}: {source.token_set.num_tokens} tokens are "
        f"fewer than data.sequence_length={data.sequence_length} and one"
      )
    # Sources of the same length would be shuffled alike by the same seed.
    own = np.random.SeedSequence((seed, index)).generate_state(1)[0]
    dataset = grain.MapDataset.source(source).seed(int(own))
    datasets.append(dataset.shuffle().repeat())
  if len(datasets) == 1:
    return datasets[0]
  mixture = Mixture(data.ratios)
  return grain.MapDataset.select_from_datasets(datasets, mixture)


class HeldOut:
  """The held-out sequences of all sources, in order; the last ones padded.

  Attributes:
    text_bytes: of their documents as UTF-8 ("fake": one a target).
    notes: of the sets; of several sets, sums of the numbers all of them have.
  """

  def __init__(self, data: TextDataConfig, vocab_size: int):
    """Opens the sets.

    Args:
      data: the section.
      vocab_size: of the model.

    Raises:
      FileNotFoundError: a set, or a file of it, is missing.
      ValueError: a set is damaged, does not fit the model, or has another
        tokenizer than the others.
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
    """A packed sequence."""
    if not 0 <= index < len(self):
      raise IndexError(f"index={index} of {len(self)} sequences")
    source = bisect.bisect_right(self._ends, index)
    first = self._ends[source] - len(self._sources[source])
    return self._sources[source][index - first]


def open_sets(
  data: TextDataConfig, vocab_size: int, split: str
) -> dict[str, TokenSet]:
  """Opens one split of every source.

  Args:
    data: the section; not "fake".
    vocab_size: of the model.
    split: "train" or "val".

  Returns:
    The set by the source's name.

  Raises:
    FileNotFoundError: a set, or a file of it, is missing.
    ValueError: a set is damaged, does not fit the model, or has another
      tokenizer than the others or than the other split.
  """
  described = _describe_sets(data, vocab_size, split)
  return {name: TokenSet(folder) for name, (folder, _) in described.items()}


def open_tokenizer(
  data: TextDataConfig, vocab_size: int, split: str = "train"
) -> Tokenizer | None:
  """The tokenizer of the configured text; None for "fake".

  It needs what the sets say of themselves and the tokenizer's file, no shard.

  Raises:
    FileNotFoundError: a set, or the tokenizer's file, is missing.
    ValueError: one of these is damaged, or the sets do not fit the model or
      each other, as for `open_sets`.
  """
  if data.source == "fake":
    return None
  (folder, metadata), *_ = _describe_sets(data, vocab_size, split).values()
  return read_tokenizer(folder, metadata)


def _describe_sets(
  data: TextDataConfig, vocab_size: int, split: str
) -> dict[str, tuple[pathlib.Path, dict[str, Any]]]:
  """Folder and metadata of one split of every source, checked."""
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
  """What a token set says of itself.

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
  (first, ours), *others = tokenizers.items()
  for folder, theirs in others:
    if theirs["sha256"] != ours["sha256"]:
      raise ValueError(
        f"{folder}: made with a tokenizer {theirs['kind']!r} of sha256 "
        f"{theirs['sha256'][:16]}, {first} with one {ours['kind']!r} of "
        f"{ours['sha256'][:16]}; their ids mean different text"
      )


def _merge(notes: list[dict[str, Any]]) -> dict[str, Any]:
  if len(notes) == 1:
    return notes[0]
  return {
    key: sum(entry[key] for entry in notes)
    for key, value in notes[0].items()
    if isinstance(value, int) and all(key in entry for entry in notes)
  }
