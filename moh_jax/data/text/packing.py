"""Packed sequences of a fixed length N, cut from sets of tokens.

The inputs of sequence j are tokens j * N to (j + 1) * N - 1 of the set, and its
targets are the tokens that follow each of them, so every token but the first is
a target once. A sequence depends on j alone and is a dict of arrays [N]:

  inputs, targets: int32 token ids.
  segments: int32, numbers the documents in the sequence from 1; 0 is padding.
  positions: int32, counts from 0 within each segment.
  weights: float32, 0 where the target is padding or starts the next document,
    else 1.

If documents are not kept apart, the whole sequence is one segment.
"""

from typing import Any

import numpy as np

from moh_jax.data.text.token_sets import TokenSet, has_ends

Sequence = dict[str, np.ndarray]


class PackedSource:
  """Source of the packed sequences of a set of tokens, in order."""

  def __init__(
    self,
    token_set: TokenSet,
    length: int,
    separate: bool = True,
    *,
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
    self.token_set = token_set
    self._length, self._separate = length, separate
    self._has_ends = separate and has_ends(token_set.folder, token_set.metadata)
    targets = max(token_set.num_tokens - 1, 0)
    self._examples = targets // length
    if keep_rest:
      self._examples = -(-targets // length)

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> Sequence:
    if not 0 <= index < self._examples:
      raise IndexError(f"index={index} of {self._examples} sequences")
    start = index * self._length
    stop = min(start + self._length + 1, self.token_set.num_tokens)
    tokens = self.token_set.tokens(start, stop)
    starts = np.empty(0, np.int64)
    if self._separate:
      ends = self.token_set.ends
      first = np.searchsorted(ends, start, "right")
      starts = ends[first : np.searchsorted(ends, stop, "left")] - start
    return pack(tokens, starts, self._length)

  def text_bytes(self, indices: np.ndarray) -> float:
    """UTF-8 bytes of the text that sequences [S] int predict; reads no tokens.

    The bytes of the set are divided evenly among its tokens of text. Begin and
    end of text have none, but one of them is predicted in place of the other.
    """
    metadata, total = self.token_set.metadata, self.token_set.num_tokens
    starts = indices * self._length
    stops = np.minimum(starts + self._length + 1, total)
    targets, tokens = stops - starts - 1, total - 1
    if self._separate:
      ends = self.token_set.ends
      targets -= np.searchsorted(ends, stops, "left")
      targets += np.searchsorted(ends, starts, "right")
      tokens = total - metadata["documents"] * self._has_ends
    return metadata["text_bytes"] * (targets.sum() / max(tokens, 1))


class FakeSequences:
  """Source of random sequences; sequence i is the same in every run."""

  def __init__(
    self,
    vocab_size: int,
    length: int,
    examples: int,
    separate: bool = True,
    *,
    seed: int = 0,
  ):
    """Prepares the source.

    Args:
      vocab_size: number of token ids.
      length: tokens of a sequence, N.
      examples: number of sequences.
      separate: keep documents apart, as segments of their own.
      seed: seed of the tokens; each split has its own.
    """
    self._vocab_size, self._length = vocab_size, length
    self._examples, self._separate, self._seed = examples, separate, seed

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
