"""Options of commands that read files of text; importable without JAX."""

import dataclasses
import itertools
from collections.abc import Iterator

from moh_jax.cli.options import BaseOptions, Place, option
from moh_jax.data.text_files import (
  PIECE_BYTES,
  OnBad,
  list_pieces,
  read_documents,
  stop,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts(BaseOptions):
  """Options of what reads files of text.

  Attributes:
    data: text files, addresses (hf://datasets/...) or quoted patterns with *, ?
      and **: .jsonl, .ndjson and .json hold one JSON object a line, .parquet
      and .arrow a table, any other file is one document; all but tables also
      .gz or .zst. Or a folder that save_to_disk of the library datasets wrote.
    field: field of JSON objects and tables that is the text.
  """

  data: tuple[Place, ...] = option("listed")
  field: str = "text"

  def texts(self, on_bad: OnBad = stop) -> Iterator[str]:
    """The documents of the files, one after another.

    Args:
      on_bad: as for `read_documents`.

    Raises:
      FileNotFoundError: there is no such file; before any is read.
    """
    pieces = itertools.chain.from_iterable(list_pieces(self.data, PIECE_BYTES))
    return (
      text
      for piece in pieces
      for _, text in read_documents(piece, self.field, on_bad)
    )
