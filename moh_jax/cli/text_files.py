"""Options of commands that read files of text; importable without JAX."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from moh_jax.cli.options import BaseOptions, Place, option
from moh_jax.data.text_files import (
  ON_ERROR,
  PIECE_BYTES,
  OnBad,
  Piece,
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
    """
    pieces = itertools.chain.from_iterable(list_pieces(self.data, PIECE_BYTES))
    for piece in pieces:
      for _, text in read_documents(piece, self.field, on_bad):
        yield text


def add_texts(
  parser: argparse.ArgumentParser, *, required: bool = True, note: str = ""
) -> None:
  """Adds --data and --field, of files of text.

  Args:
    parser: of the command.
    required: whether the command reads nothing else.
    note: what else to say of the files.
  """
  parser.add_argument(
    "--data",
    required=required,
    nargs="+",
    metavar="GLOB",
    help="text files, addresses (hf://datasets/...) or quoted patterns with "
    "*, ? and **: .jsonl, .ndjson and .json hold one JSON object a line, "
    ".parquet and .arrow a table, any other file is one document; all but "
    "tables also .gz or .zst. Or a folder that save_to_disk of the library "
    f"datasets wrote{note}",
  )
  parser.add_argument(
    "--field",
    default="text",
    help="field of JSON objects and tables that is the text (default: text)",
  )


def add_on_error(parser: argparse.ArgumentParser, where: str) -> None:
  """Adds --on-error, for commands that read text in bulk.

  Args:
    parser: of the command.
    where: what is told of lines that are skipped.
  """
  parser.add_argument(
    "--on-error",
    choices=ON_ERROR,
    default="stop",
    help="what to do at a line, row or file that is not JSON, not UTF-8, lacks "
    f"the field or is damaged: stop (default), or skip it; {where}",
  )


def read_texts(
  groups: Iterable[Iterable[Piece]], field: str, on_bad: OnBad = stop
) -> Iterator[str]:
  """The documents of files, one after another.

  Args:
    groups: what `list_pieces` found.
    field: of JSON objects and tables, see `add_texts`.
    on_bad: as for `read_documents`.
  """
  for piece in itertools.chain.from_iterable(groups):
    for _, text in read_documents(piece, field, on_bad):
      yield text
