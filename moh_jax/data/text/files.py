"""Reads documents from files of plain text, JSON lines, Parquet and Arrow.

The suffix decides what a file is; ".gz" or ".zst" may follow that of text.
".jsonl", ".ndjson" and ".json" hold one JSON object per line, ".parquet" and
".arrow" a table, and any other file is plain text that forms one document.
"""

import codecs
import json
from collections.abc import Iterator

from moh_jax.data.text.bad_text import BadTextError, OnBad, damage, stop
from moh_jax.data.text.pieces import Piece, file_format
from moh_jax.data.text.tables import checked_text, read_rows
from moh_jax.data.text.unpack import open_unpacked

# Of a document, and of a line of JSON, after unpacking. Tokens take many times
# the text's memory, and JSON's lists and objects up to 25 times the line's.
MOST_BYTES = 1 << 27
MOST_LINE_BYTES = 1 << 25


def read_documents(
  piece: Piece, field: str, on_bad: OnBad = stop
) -> Iterator[tuple[str, str]]:
  """Reads the documents of a piece, in order.

  Args:
    piece: part of a file.
    field: field of a JSON object, or column of a table, that holds the text;
      null counts as "".
    on_bad: called for a line, row or file that holds no text, with the name
      that its document would have; reading goes on with the next one, or ends
      where a packed file is damaged.

  Yields:
    A unique name and the text of each document. The name is the file's for
    plain text, else the file's with the line or row from 1: "web.jsonl:123".

  Raises:
    OSError: the disk or the network failed.
    ValueError: a table has no such column, an optional library is missing, or
      what `on_bad` raises: by default the `BadTextError`, whose message names
      the file and the line.
  """
  kind, packing = file_format(piece.file)
  if kind == "text":
    return _read_text(piece, packing, on_bad)
  if kind == "jsonl":
    return _read_lines(piece, packing, field, on_bad)
  return read_rows(piece, field, on_bad)


def _read_text(
  piece: Piece, packing: str, on_bad: OnBad
) -> Iterator[tuple[str, str]]:
  try:
    with (
      damage(piece.file),
      open_unpacked(piece.file, packing) as stream,
    ):
      content = stream.read(MOST_BYTES + 1)
    _check_size(len(content), piece.file, MOST_BYTES)
    text = _decode(content.removeprefix(codecs.BOM_UTF8), piece.file)
  except BadTextError as problem:
    on_bad(piece.name, problem)
  else:
    yield piece.name, text


def _read_lines(
  piece: Piece, packing: str, field: str, on_bad: OnBad
) -> Iterator[tuple[str, str]]:
  with open_unpacked(piece.file, packing) as stream:
    left = None  # bytes of the piece to read; None reads to the end
    if not packing:
      stream.seek(piece.start)
      left = piece.stop - piece.start
    number = piece.first
    while left is None or left > 0:
      name, where = f"{piece.name}:{number}", f"{piece.file}, line {number}"
      try:
        with damage(where):
          line = part = stream.readline(MOST_LINE_BYTES + 1)
          size = len(line)
          # What is left of a line that is too long is read, and not kept.
          while len(part) > MOST_LINE_BYTES and not part.endswith(b"\n"):
            part = stream.readline(MOST_LINE_BYTES + 1)
            size += len(part)
      except BadTextError as problem:
        on_bad(name, problem)
        return
      if not line:
        if left:
          raise ValueError(f"{where}: the file became shorter")
        return
      if left is not None:
        left -= size
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)  # some programs add it
      if size > MOST_LINE_BYTES or (line and not line.isspace()):
        try:
          _check_size(size, where, MOST_LINE_BYTES)
          text = _parse(line, field, where)
        except BadTextError as problem:
          on_bad(name, problem)
        else:
          yield name, text
      number += 1


def _parse(line: bytes, field: str, where: str) -> str:
  text = _decode(line, where)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:  # "[[[[..." is the latter
    raise BadTextError(where, "not JSON", f": {error}") from error
  if not isinstance(value, dict) or field not in value:
    found = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise BadTextError(where, f"no field {field!r}", f", found {found}")
  return checked_text(value[field], field, where)


def _check_size(size: int, where: str, most: int) -> None:
  if size > most:
    raise BadTextError(
      where, "too long", f": a document of more than {most:,} bytes; cut it"
    )


def _decode(content: bytes, where: str) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise BadTextError(where, "not UTF-8", f": {error}") from error
