"""Reads documents from files of plain text, JSON lines and Parquet.

The suffix decides what a file is; ".gz" or ".zst" may follow it. ".jsonl",
".ndjson" and ".json" hold one JSON object per line, ".parquet" holds a table,
and any other file is plain text that forms one document.
"""

import contextlib
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

from moh_jax.data.extras import import_extra
from moh_jax.data.text.pieces import Piece, file_format, open_parquet

_BUFFER_BYTES = 1 << 20  # of unpacked .zst files
_ROWS = 256  # rows of a table that are read into memory at one time


def read_documents(piece: Piece, field: str) -> Iterator[tuple[str, str]]:
  """Reads the documents of a piece, in order.

  Args:
    piece: part of a file.
    field: field of a JSON object, or column of a table, that holds the text;
      null counts as "".

  Yields:
    A unique name and the text of each document. The name is the file's for
    plain text, else the file's with the line or row from 1: "web.jsonl:123".

  Raises:
    ValueError: the file is damaged, is not UTF-8 or lacks the field (the
      message names file and line), or an optional library is missing.
  """
  kind, packing = file_format(piece.file)
  if kind == "parquet":
    return _read_rows(piece, field)
  if kind == "jsonl":
    return _read_lines(piece, packing, field)
  return _read_text(piece, packing)


def _read_text(piece: Piece, packing: str) -> Iterator[tuple[str, str]]:
  with _damage(piece.file), _open(piece.file, packing) as stream:
    content = stream.read()
  yield piece.name, _decode(content, piece.file)


def _read_lines(
  piece: Piece, packing: str, field: str
) -> Iterator[tuple[str, str]]:
  with _open(piece.file, packing) as stream:
    left = None  # bytes of the piece to read; None reads to the end
    if not packing:
      stream.seek(piece.start)
      left = piece.stop - piece.start
    number = piece.first
    while left is None or left > 0:
      where = f"{piece.file}, line {number}"
      with _damage(where):
        line = stream.readline()
      if not line:
        if left:
          raise ValueError(f"{where}: the file became shorter")
        return
      if left is not None:
        left -= len(line)
      if not line.isspace():
        yield f"{piece.name}:{number}", _parse(line, field, where)
      number += 1


def _parse(line: bytes, field: str, where: str) -> str:
  text = _decode(line, where)
  try:
    value = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{where}: not JSON: {error}") from error
  if not isinstance(value, dict) or field not in value:
    found = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise ValueError(f"{where}: no field {field!r}, found {found}")
  return _checked(value[field], field, where)


def _read_rows(piece: Piece, field: str) -> Iterator[tuple[str, str]]:
  pyarrow = import_extra("pyarrow", piece.file)
  number = piece.first
  with open_parquet(piece.file) as table:
    columns = table.schema_arrow.names
    if field not in columns:
      raise ValueError(f"{piece.file}: no column {field!r}, found {columns}")
    batches = table.iter_batches(
      _ROWS,
      row_groups=list(range(piece.start, piece.stop)),
      columns=[field],
      use_threads=False,
    )
    while True:
      where = f"{piece.file}, row {number}"
      try:
        batch = next(batches, None)
        values = [] if batch is None else batch.column(0).to_pylist()
      except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{where} or after: damaged: {error}") from error
      if batch is None:
        return
      for value in values:
        where = f"{piece.file}, row {number}"
        yield f"{piece.name}:{number}", _checked(value, field, where)
        number += 1


def _checked(value: Any, field: str, where: str) -> str:
  """Returns a field's text, or raises ValueError if it is none."""
  if value is None:
    return ""
  if not isinstance(value, str):
    raise ValueError(
      f"{where}: {field!r} is {type(value).__name__}, expected text"
    )
  try:
    value.encode()
  except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not text
    raise ValueError(f"{where}: half a surrogate pair: {error}") from error
  return value


def _decode(content: bytes, where: str) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"{where}: not UTF-8: {error}") from error


def _open(file: str, packing: str) -> IO[bytes]:
  if packing == ".gz":
    return gzip.open(file)
  if packing == ".zst":
    pyarrow = import_extra("pyarrow", file)
    packed = pathlib.Path(file).open("rb")
    unpacked = pyarrow.CompressedInputStream(packed, "zstd")
    return io.BufferedReader(unpacked, _BUFFER_BYTES)
  return pathlib.Path(file).open("rb")


@contextlib.contextmanager
def _damage(where: str) -> Iterator[None]:
  """Turns errors of unpacking into a ValueError that names the place."""
  try:
    yield
  except (EOFError, OSError, zlib.error) as error:
    if getattr(error, "errno", None) is not None:  # the disk's, not the file's
      raise
    raise ValueError(f"{where}: damaged or truncated: {error}") from error
