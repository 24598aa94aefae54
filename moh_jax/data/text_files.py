"""Reads documents, and rows, from files of text, JSON lines, Parquet and Arrow.

The suffix decides what a file is; ".gz" or ".zst" may follow that of text.
".jsonl", ".ndjson" and ".json" hold one JSON object per line, or ".json" one
list of objects; ".parquet" and ".arrow" hold a table, and any other file is
plain text that forms one document.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moh_jax.data.input_files import (
  MissingLibraryError,
  import_extra,
  list_files,
  opened,
)

# Of a document, after unpacking: its tokens take many times the text's memory.
MOST_BYTES = 1 << 27
PROMPT = "prompt"  # field of a file of prompts
_JSON, _LINES = (
  tuple(suffix + packing for suffix in kinds for packing in ("", ".gz", ".zst"))
  for kinds in ((".json",), (".jsonl", ".ndjson"))
)
_TABLES = (".parquet", ".arrow")
ROW_SUFFIXES = (*_JSON, *_LINES, *_TABLES)  # of files of rows with fields
_ROWS = 64  # of a Parquet table that are read into memory at one time


class BadTextError(ValueError):
  """A line or row that holds no text; the message names file and number."""


def read_rows(
  file: str, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, Any]]:
  """Reads the rows of a file of JSON lines or a table.

  Args:
    file: path or address, with a suffix of `ROW_SUFFIXES`.
    columns: of a table that are read; None is all.

  Yields:
    The place of each row, counted from 1, as "DIR/web.jsonl:123", and its
    fields, or a BadTextError in place of a line or entry that is no object.

  Raises:
    ValueError: the file is damaged or cannot be read, a column is missing, or
      an optional library is.
  """
  try:
    if file.lower().endswith(_TABLES):
      found = _table_rows(file, columns)
    else:
      found = _json_rows(file)
    for number, row in found:
      yield f"{file}:{number}", _checked(row, f"{file}:{number}")
  except (BadTextError, MissingLibraryError):
    raise
  except Exception as error:  # of file systems, of unpacking, of tables
    raise ValueError(f"{file}: damaged or cannot be read: {error}") from error


def _json_rows(file: str) -> Iterator[tuple[int, Any]]:
  """Numbers and lines, or entries of the list that the file is."""
  with opened(file) as stream:
    head = stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()
    if file.lower().endswith(_JSON) and head.startswith(b"["):
      yield from enumerate(json.loads(stream.read().decode("utf-8-sig")), 1)
      return
    for number, line in enumerate(stream, 1):
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)  # some programs add it
      if not line.isspace():
        yield number, line


def _table_rows(
  file: str, columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Numbers and rows, without the fields that are null."""
  with opened(file) as stream:
    if file.lower().endswith(".parquet"):
      parquet = import_extra("pyarrow.parquet", file)
      table = parquet.ParquetFile(stream, page_checksum_verification=True)
      names = table.schema_arrow.names
      batches = table.iter_batches(_ROWS, columns=columns, use_threads=False)
    else:
      ipc = import_extra("pyarrow.ipc", file)
      if stream.peek(6).startswith(b"ARROW1"):  # Feather
        table = ipc.open_file(stream)
        batches = map(table.get_batch, range(table.num_record_batches))
      else:
        table = batches = ipc.open_stream(stream)
      names = table.schema.names
    if missing := set(columns or ()) - set(names):
      raise BadTextError(f"{file}: no column {min(missing)!r}, found {names}")
    number = 0
    for batch in batches:
      rows = batch if columns is None else batch.select(columns)
      for row in rows.to_pylist():
        yield (number := number + 1), without_nulls(row, deep=True)


def _checked(row: Any, place: str) -> Any:
  """An object, also of its line of JSON, or the error that it is."""
  try:
    row = json.loads(row) if isinstance(row, bytes) else row
  except UnicodeDecodeError as error:
    return BadTextError(f"{place}: not UTF-8: {error}")
  except (ValueError, RecursionError) as error:  # "[[[[..." is the latter
    return BadTextError(f"{place}: not JSON: {error}")
  if isinstance(row, dict):
    return row
  return BadTextError(f"{place}: no JSON object, found {type(row).__name__}")


def read_documents(
  file: str, field: str
) -> Iterator[tuple[str, str | BadTextError]]:
  """Reads the documents of a file, in order.

  Args:
    file: path or address.
    field: field of a JSON object, or column of a table, that holds the text;
      null counts as "".

  Yields:
    The place and the text of each document. The place is the file of plain
    text, else it has the line or row too: "DIR/web.jsonl:123". What holds no
    text is an error in its place, whose message begins with that.

  Raises:
    ValueError: as `read_rows`.
  """
  if file.lower().endswith(ROW_SUFFIXES):
    is_table = file.lower().endswith(_TABLES)
    for place, row in read_rows(file, [field] if is_table else None):
      if isinstance(row, dict):
        if not is_table and field not in row:
          text = f"{place}: no field {field!r}, found {sorted(row)}"
          row = BadTextError(text)
        else:
          row = _checked_text(row.get(field), field, place)
      yield place, row
    return
  try:
    with opened(file) as stream:
      content = stream.read(MOST_BYTES + 1)
  except Exception as error:
    raise ValueError(f"{file}: damaged or cannot be read: {error}") from error
  try:
    yield file, _checked_text(content.decode("utf-8-sig"), field, file)
  except UnicodeDecodeError as error:
    yield file, BadTextError(f"{file}: not UTF-8: {error}")


def _checked_text(text: Any, field: str, place: str) -> str | BadTextError:
  if text is None:
    return ""
  if not isinstance(text, str):
    what = f"{field!r} is {type(text).__name__}, expected text"
    return BadTextError(f"{place}: {what}")
  if len(text) > MOST_BYTES:
    return BadTextError(f"{place}: more than {MOST_BYTES:,} bytes; cut it")
  try:
    text.encode()
  except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not text
    return BadTextError(f"{place}: half a surrogate pair: {error}")
  return text


def read_texts(
  files: Iterable[str], field: str, skipped: list[str] | None = None
) -> Iterator[str]:
  """The texts of `read_documents`, of some files.

  Args:
    files: paths or addresses.
    field: that holds the text.
    skipped: gets the messages of what holds no text; without it that is
      raised, as is damage of a file in any case.
  """
  for file in files:
    for _, text in read_documents(file, field):
      if isinstance(text, str):
        yield text
      elif skipped is None:
        raise text
      else:
        skipped.append(str(text))


def read_prompts(file: str) -> list[str]:
  """Reads prompts: the field "prompt" of rows in any form.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is plain text, whose lines could be meant in several ways, a
      row has no prompt (the message names the line), or there is none.
  """
  files = list_files([file])
  if plain := [x for x in files if not x.lower().endswith(ROW_SUFFIXES)]:
    raise ValueError(
      f"{plain[0]}: plain text is not taken as prompts; write a file .jsonl "
      'with one JSON object a line, such as {"prompt": "TEXT"}'
    )
  prompts = list(read_texts(files, PROMPT))
  if not prompts:
    raise ValueError(f"{file}: holds no prompt")
  return prompts


def without_nulls(value: Any, deep: bool = False) -> Any:
  """A row, or a list of them, without the fields that are null.

  Tables have every field in every row; templates ask whether one is there.

  Args:
    value: JSON; what is neither an object nor a list stays.
    deep: also in what the fields hold.
  """
  if isinstance(value, list):
    return [without_nulls(one, deep) for one in value]
  if isinstance(value, dict):
    pairs = [(k, x) for k, x in value.items() if x is not None]
    return {k: without_nulls(x, True) if deep else x for k, x in pairs}
  return value
