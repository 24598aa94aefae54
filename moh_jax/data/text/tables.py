"""Reads a column of text from Parquet and Arrow tables.

Arrow files are streams, as the library `datasets` writes them, or the format
with a footer (Feather).
"""

from collections.abc import Iterator
from typing import Any

from moh_jax.data.extras import import_extra
from moh_jax.data.text.bad_text import BadTextError, OnBad, damage
from moh_jax.data.text.pieces import Piece, file_format, open_parquet
from moh_jax.data.text.places import is_address, open_file

_ROWS = 256  # rows of a Parquet table that are read into memory at one time
_FEATHER = b"ARROW1"  # first bytes of Arrow files that have a footer


def read_rows(
  piece: Piece, field: str, on_bad: OnBad
) -> Iterator[tuple[str, str]]:
  """Reads the texts of a table's piece; arguments as for `read_documents`.

  A row group or batch that is damaged counts as one bad row.
  """
  kind, _ = file_format(piece.file)
  columns = _parquet_columns if kind == "parquet" else _arrow_columns
  for first, column in columns(piece, field, on_bad):
    for number, value in enumerate(column, first):
      name = f"{piece.name}:{number}"
      where = f"{piece.file}, row {number}"
      try:
        text = checked_text(_as_python(value, where), field, where)
      except BadTextError as problem:
        on_bad(name, problem)
      else:
        yield name, text


def checked_text(value: Any, field: str, where: str) -> str:
  """A field's text; null counts as "".

  Raises:
    BadTextError: the value is no text that UTF-8 can hold.
  """
  if value is None:
    return ""
  if not isinstance(value, str):
    reason = f"{field!r} is {type(value).__name__}, expected text"
    raise BadTextError(where, reason)
  try:
    value.encode()
  except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not text
    raise BadTextError(where, "half a surrogate pair", f": {error}") from error
  return value


def _as_python(value: Any, where: str) -> Any:
  try:
    return value.as_py()
  except UnicodeDecodeError as error:
    raise BadTextError(where, "not UTF-8", f": {error}") from error


def _parquet_columns(
  piece: Piece, field: str, on_bad: OnBad
) -> Iterator[tuple[int, Any]]:
  """Values of rows, and the number of the first of them."""
  with open_parquet(piece.file) as table:
    _check_column(piece.file, table.schema_arrow, field)
    after = piece.first
    for group in range(piece.start, piece.stop):
      number, after = after, after + table.metadata.row_group(group).num_rows
      batches = table.iter_batches(
        _ROWS, row_groups=[group], columns=[field], use_threads=False
      )
      while (batch := _next(batches, piece, number, on_bad)) is not None:
        yield number, batch.column(0)
        number += batch.num_rows


def _arrow_columns(
  piece: Piece, field: str, on_bad: OnBad
) -> Iterator[tuple[int, Any]]:
  pyarrow = import_extra("pyarrow", piece.file)
  ipc = import_extra("pyarrow.ipc", piece.file)
  # Of a mapped file, other columns are never read.
  is_local = not is_address(piece.file)
  with (pyarrow.memory_map if is_local else open_file)(piece.file) as file:
    try:
      with damage(piece.file, pyarrow.ArrowException):
        has_footer = file.read(len(_FEATHER)) == _FEATHER
        file.seek(0)
        reader = (ipc.open_file if has_footer else ipc.open_stream)(file)
    except BadTextError as problem:
      on_bad(piece.name, problem)
      return
    _check_column(piece.file, reader.schema, field)
    batches = reader
    if has_footer:
      batches = map(reader.get_batch, range(reader.num_record_batches))
    number = piece.first
    while (batch := _next(batches, piece, number, on_bad)) is not None:
      yield number, batch.column(field)
      number += batch.num_rows


def _next(
  batches: Iterator[Any], piece: Piece, number: int, on_bad: OnBad
) -> Any:
  """The next rows, or None at the end and where the table is damaged."""
  pyarrow = import_extra("pyarrow", piece.file)
  try:
    with damage(f"{piece.file}, row {number} or after", pyarrow.ArrowException):
      return next(batches, None)
  except BadTextError as problem:
    on_bad(f"{piece.name}:{number}", problem)
    return None


def _check_column(file: str, schema: Any, field: str) -> None:
  """Refuses a table without the column, whatever is done with bad rows."""
  if field not in schema.names:
    raise ValueError(f"{file}: no column {field!r}, found {schema.names}")
