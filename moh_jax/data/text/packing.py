"""Packed sequences of a fixed length out of token sets.

Sequence j of a set has the inputs j * N to (j + 1) * N - 1 and as targets the
tokens after them, so every token is a target once. It is a pure function of j:
{"inputs", "targets", "segments", "positions"} [N] int32 and "weights" [N]
float32. Segments count the pieces of documents from 1; 0 is padding. Positions
count from 0 within each. A weight is 0 where the target is padding or begins
the next document. Documents that are not separate are one segment.
"""

from typing import Any

import numpy as np

from moh_jax.data.text.token_sets import TokenSet

Sequence = dict[str, np.ndarray]


class PackedSource:
  """The sequences of a set, in order."""

  def __init__(
    self,
    token_set: TokenSet,
    length: int,
    separate: bool = True,
    *,
    keep_rest: bool = False,
  ):
    """Describes the sequences; reads nothing.

    Args:
      token_set: the tokens.
      length: N.
      separate: keep documents apart.
      keep_rest: give the tokens after the last whole sequence too, padded.
    """
    self.token_set = token_set
    self._length, self._separate = length, separate
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


class FakeSequences:
  """Random tokens and documents, a function of the index alone."""

  def __init__(
    self,
    vocab_size: int,
    length: int,
    examples: int,
    separate: bool = True,
    *,
    seed: int = 0,
  ):
    """Describes them.

    Args:
      vocab_size: ids are below it.
      length: N.
      examples: their number.
      separate: keep documents apart.
      seed: splits have their own.
    """
    self._vocab_size, self._length = vocab_size, length
    self._examples, self._separate, self._seed = examples, separate, seed

  def __len__(self) -> int:
    return self._examples

  def __getitem__(self, index: int) -> Sequence:
    rng = np.random.default_rng((self._seed, index))
    count = self._length + 1
    tokens = rng.integers(0, self._vocab_size, count, np.int32)
    # Three documents begin in a sequence on average.
    starts = np.flatnonzero(rng.random(count) < 3 / count)
    starts = starts[starts > 0] if self._separate else starts[:0]
    return pack(tokens, starts, self._length)


def pack(tokens: np.ndarray, starts: np.ndarray, length: int) -> Sequence:
  """Makes one sequence.

  Args:
    tokens: [n + 1] int32, n <= `length`: the inputs and one more.
    starts: [S] int, rising, in [1, n]: where further documents begin.
    length: N.
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
