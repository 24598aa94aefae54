"""Reads a column of text from Parquet and Arrow tables.

Arrow files are streams, as the library `datasets` writes them, or the format
with a footer (Feather).
"""

from collections.abc import Callable, Iterator
from typing import Any

from moh_jax.data.extras import import_extra
from moh_jax.data.text.bad_text import BadTextError, OnBad, damage
from moh_jax.data.text.pieces import Piece, file_format, open_parquet
from moh_jax.data.text.places import is_address, open_file

_ROWS = 256  # rows of a Parquet table that are read into memory at one time
_FEATHER = b"ARROW1"  # first bytes of Arrow files that have a footer
# Whether texts lie within their batch is checked as of bytes, since reading
# them elsewhere would end the process; that they are UTF-8, one by one.
_BYTES = {"string": "binary", "large_string": "large_binary"}


def read_rows(
  piece: Piece, field: str, on_bad: OnBad
) -> Iterator[tuple[str, str]]:
  """Reads the texts of a table's piece; arguments as for `read_documents`.

  A row group or batch that is damaged counts as one bad row. How many rows a
  damaged batch of an Arrow file had is not known: those after it are numbered
  without it.
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
      yield from _columns(batches, piece, field, number, on_bad)


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
    batches, place = reader, file.tell
    if has_footer:
      batches = map(reader.get_batch, range(reader.num_record_batches))
      place = None
    yield from _columns(batches, piece, field, piece.first, on_bad, place)


def _columns(
  batches: Iterator[Any],
  piece: Piece,
  field: str,
  number: int,
  on_bad: OnBad,
  place: Callable[[], int] | None = None,
) -> Iterator[tuple[int, Any]]:
  """Columns of batches, each with the number of its first row.

  Args:
    batches: of rows.
    piece: that they belong to.
    field: name of the column.
    number: of the first row.
    on_bad: called for batches that are damaged.
    place: of a stream, how far it was read; where damage does not let it get
      further, it ends.
  """
  pyarrow = import_extra("pyarrow", piece.file)
  damaged = False
  while True:
    before = place() if place else None
    where = f"{piece.file}, row {number} or after"
    try:
      with damage(where, pyarrow.ArrowException):
        batch = next(batches, None)
        if batch is None:
          return
        column = batch.column(field)
        kind = str(column.type)
        column.view(_BYTES.get(kind, column.type)).validate(full=True)
    except BadTextError as problem:
      if damaged and place and place() == before:
        return  # nothing is left after what was reported
      damaged = True
      on_bad(f"{piece.name}:{number}", problem)
    else:
      damaged = False
      yield number, column
      number += batch.num_rows


def _check_column(file: str, schema: Any, field: str) -> None:
  """Refuses a table without the column, whatever is done with bad rows."""
  if field not in schema.names:
    raise ValueError(f"{file}: no column {field!r}, found {schema.names}")
