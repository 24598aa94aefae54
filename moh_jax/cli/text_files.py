"""Options of commands that read files of text; importable without JAX."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

from moh_jax.cli.options import BaseOptions, Place, option
from moh_jax.data.text_files import PIECE_BYTES, list_pieces, read_texts


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

  def texts(self, skipped: Counter[str] | None = None) -> Iterator[str]:
    """The documents of the files, one after another.

    Args:
      skipped: counts what holds no text, see `read_texts`.

    Raises:
      FileNotFoundError: there is no such file; before any is read.
    """
    pieces = itertools.chain.from_iterable(list_pieces(self.data, PIECE_BYTES))
    return read_texts(pieces, self.field, skipped)
