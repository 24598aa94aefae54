"""Cuts text files into pieces that can be read independently.

The pieces depend on the files alone: not on their folder, nor on the number of
processes that read them. Large local files of JSON lines are cut between lines,
and Parquet tables between row groups; all other files stay whole.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moh_jax.data.extras import import_extra
from moh_jax.data.text.places import (
  file_size,
  is_address,
  list_files,
  open_file,
)

_PACKINGS = (".gz", ".zst")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Piece:
  """Part of a file, or all of it.

  Attributes:
    file: path or address of the file.
    name: path relative to the folder that all files share.
    start: first byte, or first row group of a Parquet table.
    stop: byte or row group after the last.
    first: number of the first line or row, counted from 1.
    size: bytes of the piece on disk; of Parquet, bytes before compression.
  """

  file: str
  name: str
  start: int
  stop: int
  first: int
  size: int


def file_format(file: str) -> tuple[str, str]:
  """Format and compression of a file, by its name.

  Returns:
    "text", "jsonl", "parquet" or "arrow", and ".gz", ".zst" or "".
  """
  path = pathlib.PurePath(file.lower())
  packing = path.suffix if path.suffix in _PACKINGS else ""
  suffix = path.with_suffix("").suffix if packing else path.suffix
  if suffix in _JSON_LINES:
    return "jsonl", packing
  if suffix in _TABLES and not packing:
    return suffix[1:], ""
  return "text", packing


def list_pieces(
  globs: Sequence[str], piece_bytes: int
) -> list[tuple[Piece, ...]]:
  """Cuts files into pieces and groups these by size.

  Args:
    globs: paths, addresses or patterns, see `places.list_files`.
    piece_bytes: approximate bytes of a group; a piece that cannot be cut may
      have more.

  Returns:
    Groups of pieces, in the order of the files' names.

  Raises:
    FileNotFoundError: a pattern matches no file.
    OSError: a file system cannot be read.
    ValueError: a table is damaged, an optional library is missing, or
      `piece_bytes` is below 1.
  """
  if piece_bytes < 1:
    raise ValueError(f"piece_bytes={piece_bytes} must be at least 1")
  files = list_files(globs)
  root = os.path.commonpath([os.path.dirname(file) for file in files])
  names = {pathlib.Path(f).relative_to(root).as_posix(): f for f in files}
  groups: list[tuple[Piece, ...]] = []
  group, size = [], 0
  for name in sorted(names):
    for piece in _cut(names[name], name, piece_bytes):
      if group and size + piece.size > piece_bytes:
        groups.append(tuple(group))
        group, size = [], 0
      group.append(piece)
      size += piece.size
  return [*groups, tuple(group)]


def fingerprint(groups: Iterable[Iterable[Piece]]) -> str:
  """Hash of the names, places and sizes of pieces, not of their contents."""
  digest = hashlib.sha256()
  for group in groups:
    for piece in group:
      # The size too: start and stop of a table are numbers of row groups.
      numbers = piece.start, piece.stop, piece.first, piece.size
      entry = " ".join(map(str, (piece.name, *numbers))) + "\n"
      digest.update(entry.encode(errors="surrogateescape"))
    digest.update(b"\n")
  return f"sha256 {digest.hexdigest()[:16]}"


@contextlib.contextmanager
def open_parquet(file: str) -> Iterator[Any]:
  """Opens a Parquet file as `pyarrow.parquet.ParquetFile`.

  Raises:
    ValueError: the file is damaged, or the library is missing.
  """
  pyarrow = import_extra("pyarrow", file)
  parquet = import_extra("pyarrow.parquet", file)
  with contextlib.ExitStack() as stack:
    source = stack.enter_context(open_file(file)) if is_address(file) else file
    try:
      table = stack.enter_context(parquet.ParquetFile(source))
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a bad footer
      raise ValueError(f"{file}: damaged or no Parquet: {error}") from error
    yield table


def _cut(file: str, name: str, piece_bytes: int) -> list[Piece]:
  kind, packing = file_format(file)
  if kind == "parquet":
    return _cut_table(file, name, piece_bytes)
  size = file_size(file)
  # Counting the lines of a remote file would read it twice.
  is_cut = kind == "jsonl" and not packing and not is_address(file)
  if not is_cut or size <= piece_bytes:
    return [Piece(file, name, 0, size, 1, size)]
  return _cut_lines(file, name, piece_bytes, size)


def _cut_lines(
  file: str, name: str, piece_bytes: int, size: int
) -> list[Piece]:
  pieces, start, line = [], 0, 1
  with open(file, "rb") as stream:
    while start < size:
      stream.seek(min(start + piece_bytes, size) - 1)
      while stream.readline(_CHUNK)[-1:] not in (b"", b"\n"):
        pass  # a line may be longer than memory
      stop = stream.tell()
      pieces.append(Piece(file, name, start, stop, line, stop - start))
      stream.seek(start)
      while start < stop:
        chunk = stream.read(min(_CHUNK, stop - start))
        if not chunk:
          raise ValueError(f"{file}: became shorter while it was read")
        line += chunk.count(b"\n")
        start += len(chunk)
  return pieces


def _cut_table(file: str, name: str, piece_bytes: int) -> list[Piece]:
  with open_parquet(file) as table:
    metadata = table.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [(group.total_byte_size, group.num_rows) for group in groups]
  pieces: list[Piece] = []
  row = 1
  for index, (size, rows) in enumerate(sizes):
    last = pieces[-1] if pieces else None
    if last and last.size + size <= piece_bytes:
      pieces[-1] = dataclasses.replace(
        last, stop=index + 1, size=last.size + size
      )
    else:
      pieces.append(Piece(file, name, index, index + 1, row, size))
    row += rows
  return pieces
