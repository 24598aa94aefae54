"""Text files as labelled examples: each file is a task."""

import itertools
from collections.abc import Sequence

import numpy as np

from moh_jax.data.text.files import read_documents
from moh_jax.data.text.packing import Sequence as Packed
from moh_jax.data.text.packing import pack
from moh_jax.data.text.pieces import Piece, list_pieces
from moh_jax.data.text.tokenizers import Tokenizer

_PIECE_BYTES = 1 << 20


class LabelledTexts:
  """Source of packed sequences of text files, with the file as the label.

  Attributes:
    names: of the tasks: the files' names.
  """

  def __init__(
    self,
    globs: Sequence[str],
    field: str,
    tokenizer: Tokenizer,
    length: int,
    most: int,
  ):
    """Reads the beginning of every file.

    Args:
      globs: paths, addresses or patterns, see `places.list_files`.
      field: of JSON objects and tables that holds the text.
      tokenizer: of the model.
      length: tokens of a sequence.
      most: sequences of each file.

    Raises:
      FileNotFoundError: a pattern matches no file.
      ValueError: a file holds fewer than two tokens, or no text.
    """
    pieces = itertools.chain.from_iterable(list_pieces(globs, _PIECE_BYTES))
    by_file = itertools.groupby(pieces, key=lambda piece: piece.name)
    self._examples: list[tuple[int, Packed]] = []
    self.names: tuple[str, ...] = ()
    for name, parts in by_file:
      sequences = _sequences(parts, field, tokenizer, length, most)
      if not sequences:
        raise ValueError(
          f"--data {name}: fewer than two tokens of text; every file is a task "
          "and needs some"
        )
      self._examples += [(len(self.names), one) for one in sequences]
      self.names += (name,)

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, index: int) -> Packed:
    label, sequence = self._examples[index]
    return {**sequence, "label": np.int32(label)}


def _sequences(
  pieces: itertools.groupby,
  field: str,
  tokenizer: Tokenizer,
  length: int,
  most: int,
) -> list[Packed]:
  """At most `most` sequences of a file; documents end with the end of text."""
  end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
  tokens: list[int] = []
  starts: list[int] = []
  for text in _texts(pieces, field):
    tokens += [*tokenizer.encode(text), *end]
    starts.append(len(tokens))
    if len(tokens) > most * length:
      break
  found, begins = np.array(tokens, np.int32), np.unique(starts)
  sequences = []
  for start in range(0, min(len(found) - 1, most * length), length):
    stop = min(start + length + 1, len(found))
    inside = begins[(begins > start) & (begins < stop)] - start
    sequences.append(pack(found[start:stop], inside, length))
  return sequences


def _texts(pieces: Sequence[Piece], field: str):
  for piece in pieces:
    for _, text in read_documents(piece, field):
      yield text
