"""Reads documents from files of plain text, JSON lines, Parquet and Arrow.

The suffix decides what a file is; ".gz" or ".zst" may follow that of text.
".jsonl", ".ndjson" and ".json" hold one JSON object per line, or ".json" one
list of objects; ".parquet" and ".arrow" hold a table, and any other file is
plain text that forms one document.

Files are read in pieces, which depend on the files alone: not on their folder,
nor on the number of processes that read them. Large local files of JSON lines
(but for ".json") are cut between lines, and Parquet tables between row groups;
all other files stay whole.
"""

import codecs
import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import pathlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from moh_jax.data import arrow_files, input_files

# Of a document, and of a line of JSON, after unpacking. Tokens take many times
# the text's memory, and JSON's lists and objects up to 25 times the line's.
MOST_BYTES = 1 << 27
MOST_LINE_BYTES = 1 << 25
# A document of what is packed may have so many bytes for one of the file; of a
# small one so many at all. Tokenizers take a hundred times the text.
_RATIO, _MOST_SMALL = 64, 1 << 23
PIECE_BYTES = 256 << 20
PROMPT = "prompt"  # field of a file of prompts
_PACKINGS = (".gz", ".zst")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
# Of files that have rows with several fields.
ROW_SUFFIXES = (
  *(suffix + packing for suffix in _JSON_LINES for packing in ("", *_PACKINGS)),
  *_TABLES,
)
_CHUNK = 1 << 20
_ROWS = 4  # of a Parquet table that are read into memory at one time
# Whether texts lie within their batch is checked as of bytes, since reading
# them elsewhere would end the process; that they are UTF-8, one by one.
_BYTES = {"string": "binary", "large_string": "large_binary"}
_ONE_PIECE = 1 << 62  # bytes; files are read one after another
_DAMAGED = "damaged or truncated"


class BadTextError(ValueError):
  """A line, row or file that holds no text.

  Attributes:
    reason: kind of the problem, for counts: "not JSON".
    detail: what else the message says, with its punctuation.
    is_damage: whether the file is at fault, and more may be lost than this.
  """

  def __init__(self, where: str, reason: str, detail: str = ""):
    super().__init__(where, reason, detail)  # as pickle makes it again
    self.reason, self.detail = reason, detail
    self.is_damage = reason == _DAMAGED

  def __str__(self) -> str:
    return "{}: {}{}".format(*self.args)


@contextlib.contextmanager
def damage(where: str, *errors: type[Exception]) -> Iterator[None]:
  """Turns errors that the content of a file causes into `BadTextError`.

  Errors of the disk or the network have a number and stay as they are: what is
  there later must not count as damaged.

  Args:
    where: the place, for the message.
    *errors: further types that a library raises.
  """
  try:
    yield
  except (EOFError, OSError, zlib.error, *errors) as error:
    if getattr(error, "errno", None) is not None:
      raise
    raise BadTextError(where, _DAMAGED, f": {error}") from error


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
    globs: paths, addresses or patterns, see `input_files.list_files`.
    piece_bytes: approximate bytes of a group, at least 1; a piece that cannot
      be cut may have more.

  Returns:
    Groups of pieces, in the order of the files' names.

  Raises:
    FileNotFoundError: a pattern matches no file.
    OSError: a file system cannot be read.
    ValueError: a table is damaged, or an optional library is missing.
  """
  files = input_files.list_files(globs)
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


def _cut(file: str, name: str, piece_bytes: int) -> list[Piece]:
  kind, _ = file_format(file)
  if kind == "parquet":
    return _cut_table(file, name, piece_bytes)
  size = input_files.file_size(file)
  # Counting the lines of a remote file would read it twice.
  is_cut = kind == "jsonl" and not file.lower().endswith((".json", *_PACKINGS))
  if not is_cut or input_files.is_address(file) or size <= piece_bytes:
    return [Piece(file, name, 0, size, 1, size)]
  pieces, start, line = [], 0, 1
  with open(file, "rb") as stream:
    while start < size:
      stream.seek(min(start + piece_bytes, size) - 1)
      while stream.readline(_CHUNK)[-1:] not in (b"", b"\n"):
        pass  # a line may be longer than memory
      stop = stream.tell()
      pieces.append(Piece(file, name, start, stop, line, stop - start))
      stream.seek(start)
      while chunk := stream.read(min(_CHUNK, stop - start)):
        line += chunk.count(b"\n")
        start += len(chunk)
      start = stop
  return pieces


def _cut_table(file: str, name: str, piece_bytes: int) -> list[Piece]:
  pieces: list[Piece] = []
  row = 1
  with input_files.open_parquet(file) as table:
    for index in range(table.num_row_groups):
      group = table.metadata.row_group(index)
      size = group.total_byte_size
      if pieces and pieces[-1].size + size <= piece_bytes:
        last, stop = pieces.pop(), index + 1
        last = dataclasses.replace(last, stop=stop, size=last.size + size)
      else:
        last = Piece(file, name, index, index + 1, row, size)
      pieces.append(last)
      row += group.num_rows
  return pieces


def read_documents(
  piece: Piece, field: str | None
) -> Iterator[tuple[str, Any]]:
  """Reads the documents of a piece, in order.

  Args:
    piece: part of a file.
    field: field of a JSON object, or column of a table, that holds the text;
      null counts as "". None reads all fields, and text is then a dict.

  Yields:
    A unique name and the text of each document. The name is the file's for
    plain text, else the file's with the line or row from 1: "web.jsonl:123".
    What holds no text is an error in its place, whose message names file and
    line; the next document follows, but after the damage of a packed file.

  Raises:
    OSError: the disk or the network failed.
    ValueError: a table has no such column, or an optional library is missing.
  """
  kind, packing = file_format(piece.file)
  is_packed = bool(packing) or kind not in ("text", "jsonl")
  most, size, total = MOST_BYTES, input_files.file_size(piece.file), 0
  if is_packed:
    most = min(most, max(_MOST_SMALL, _RATIO * size))
  try:
    if kind == "text":
      documents = iter([(piece.name, _read_text(piece.file, packing, most))])
    elif kind == "jsonl":
      documents = _read_lines(piece, packing, field, most)
    else:
      documents = _read_rows(piece, field, most)
    for name, text in documents:
      total += len(text) if is_packed and isinstance(text, str) else 0
      input_files.check_unpacked(piece.file, total, size)
      yield name, text
  except BadTextError as problem:
    yield piece.name, problem


def read_rows(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
  """Reads all fields of the rows of local files of JSON lines and tables.

  Args:
    files: paths with a suffix of `ROW_SUFFIXES`.

  Yields:
    The place of each row, as "DIR/web.jsonl:123", and its fields, or a
    BadTextError in place of what is no JSON object.

  Raises:
    BadTextError: a file is damaged.
    OSError: the disk failed.
    ValueError: an optional library is missing.
  """
  groups = list_pieces(list(map(glob.escape, files)), _ONE_PIECE)
  for piece in itertools.chain.from_iterable(groups):
    for name, row in read_documents(piece, None):
      if isinstance(row, BadTextError) and row.is_damage:
        raise row
      yield piece.file + name.removeprefix(piece.name), row


def read_texts(
  pieces: Iterable[Piece], field: str, skipped: Counter[str] | None = None
) -> Iterator[str]:
  """The texts of `read_documents`, of some pieces.

  Args:
    pieces: parts of files.
    field: that holds the text.
    skipped: counts by reason what holds no text; without it that is raised, as
      is damage of a file in any case.
  """
  for piece in pieces:
    for _, text in read_documents(piece, field):
      if isinstance(text, str):
        yield text
      elif skipped is None or text.is_damage:
        raise text
      else:
        skipped[text.reason] += 1


def _read_text(file: str, packing: str, most: int) -> str:
  with damage(file), input_files.open_unpacked(file, packing) as stream:
    content = stream.read(most + 1)
  _check_size(len(content), file, most)
  if b"\0" in content:  # such as an archive, or letters of 16 bits
    raise BadTextError(file, "no text", ": has null bytes")
  return _decode(content.removeprefix(codecs.BOM_UTF8), file)


def _read_lines(
  piece: Piece, packing: str, field: str | None, most: int
) -> Iterator[tuple[str, Any]]:
  with input_files.open_unpacked(piece.file, packing) as stream:
    if piece.file.lower().removesuffix(packing).endswith(".json"):
      with damage(piece.file, ValueError, RecursionError):
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()
        values = json.loads(stream.read()) if head.startswith(b"[") else None
      for number, value in enumerate(values or (), 1):
        where = f"{piece.file}, entry {number}"
        found = _attempt(_field, value, field, where, most)
        yield f"{piece.name}:{number}", found
      if values is not None:
        return
    left = None  # bytes of the piece to read; None reads to the end
    if not packing:
      stream.seek(piece.start)
      left = piece.stop - piece.start
    number = piece.first - 1
    while left is None or left > 0:
      number += 1
      name, where = f"{piece.name}:{number}", f"{piece.file}, line {number}"
      try:
        with damage(where):
          line = part = stream.readline(MOST_LINE_BYTES + 1)
          size = len(line)
          # What is left of a line that is too long is read, and not kept.
          while len(part) > MOST_LINE_BYTES and not part.endswith(b"\n"):
            part = stream.readline(MOST_LINE_BYTES + 1)
            size += len(part)
          if line == b"\n":  # a packed file may have a billion
            ahead = stream.peek(1)[: None if left is None else left - 1]
            blank = stream.read(len(ahead) - len(ahead.lstrip(b"\n")))
            number, size = number + len(blank), size + len(blank)
      except BadTextError as problem:
        yield name, problem
        return
      if not line:
        if left:
          raise ValueError(f"{where}: the file became shorter")
        return
      left = None if left is None else left - size
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)  # some programs add it
      if size > MOST_LINE_BYTES or not (line.isspace() or not line):
        yield name, _attempt(_parse, line, size, field, where, most)


def _attempt(read: Callable[..., Any], *args: Any) -> Any:
  """What `read` returns, or the error that it raises."""
  try:
    return read(*args)
  except BadTextError as problem:
    return problem


def _parse(
  line: bytes, size: int, field: str | None, where: str, most: int
) -> Any:
  _check_size(size, where, MOST_LINE_BYTES)
  text = _decode(line, where)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:  # "[[[[..." is the latter
    raise BadTextError(where, "not JSON", f": {error}") from error
  return _field(value, field, where, most)


def _field(value: Any, field: str | None, where: str, most: int) -> Any:
  """The text of a JSON object's field, or the object."""
  if field is None and isinstance(value, dict):
    return value
  if not isinstance(value, dict) or field not in value:
    found = sorted(value) if isinstance(value, dict) else type(value).__name__
    what = "no JSON object" if field is None else f"no field {field!r}"
    raise BadTextError(where, what, f", found {found}")
  return _checked_text(value[field], field, where, most)


def _check_size(size: int, where: str, most: int) -> None:
  if size > most:
    unpack = ", or unpack the file" if most < MOST_LINE_BYTES else ""
    text = f": a document of more than {most:,} bytes; cut it{unpack}"
    raise BadTextError(where, "too long", text)


def _decode(content: bytes, where: str) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise BadTextError(where, "not UTF-8", f": {error}") from error


def _read_rows(
  piece: Piece, field: str | None, most: int
) -> Iterator[tuple[str, Any]]:
  """Reads the texts, or all fields, of a table's piece.

  A row group or batch that is damaged counts as one bad row. How many rows a
  damaged batch of an Arrow file had is not known: those after it are numbered
  without it. Two in a row that cannot be read end the file.
  """
  pyarrow = input_files.import_extra("pyarrow", piece.file)
  number = piece.first
  for rows, batches in _groups(piece, field):
    first, read = number, True
    while True:
      before, read = read, False
      try:
        where = f"{piece.file}, row {number} or after"
        with damage(where, pyarrow.ArrowException):
          batch = next(batches, None)
          read = True
          if batch is None:
            break
          whole = field is None
          column = batch.to_struct_array() if whole else batch.column(field)
          kind = _BYTES.get(str(column.type))
          checked = column if kind is None else column.view(kind)
          checked.validate(full=True)
      except BadTextError as problem:
        if not (read or before):
          break  # nothing is left after what was reported
        yield f"{piece.name}:{number}", problem
        continue
      for row, value in enumerate(column, number):
        where = f"{piece.file}, row {row}"
        found = _attempt(_checked_text, value, field, where, most)
        yield f"{piece.name}:{row}", found
      number += batch.num_rows
    number = first + rows if rows is not None else number


def _groups(
  piece: Piece, field: str | None
) -> Iterator[tuple[int | None, Iterator[Any]]]:
  """Parts of a table that can be read whatever is wrong with the others.

  Yields:
    The number of rows, None where only the batches tell, and the batches.

  Raises:
    BadTextError: the file is damaged as a whole.
  """
  if file_format(piece.file)[0] == "parquet":
    with input_files.open_parquet(piece.file) as table:
      _check_column(piece.file, table.schema_arrow, field)
      columns = None if field is None else [field]
      options = {"columns": columns, "use_threads": False}
      for group in range(piece.start, piece.stop):
        batches = table.iter_batches(_ROWS, row_groups=[group], **options)
        yield table.metadata.row_group(group).num_rows, batches
    return
  pyarrow = input_files.import_extra("pyarrow", piece.file)
  with damage(piece.file, pyarrow.ArrowException):
    file, reader = arrow_files.open_arrow(piece.file)
  with file:
    _check_column(piece.file, reader.schema, field)
    if hasattr(reader, "get_batch"):
      for index in range(reader.num_record_batches):
        yield None, map(reader.get_batch, [index])
    else:
      yield None, reader


def _check_column(file: str, schema: Any, field: str | None) -> None:
  """Refuses a table without the column, whatever is done with bad rows."""
  if field is not None and field not in schema.names:
    raise ValueError(f"{file}: no column {field!r}, found {schema.names}")


def _checked_text(value: Any, field: str | None, where: str, most: int) -> Any:
  """A field's text, of JSON or a table; null counts as "". None: a whole row.

  Raises:
    BadTextError: the value is no text that UTF-8 can hold.
  """
  try:
    if hasattr(value, "as_py"):
      value = without_nulls(value.as_py(), deep=True)
    if field is None:
      return value
    if value is None:
      return ""
    if not isinstance(value, str):
      reason = f"{field!r} is {type(value).__name__}, expected text"
      raise BadTextError(where, reason)
    _check_size(len(value), where, most)
    value.encode()
  except UnicodeDecodeError as error:
    raise BadTextError(where, "not UTF-8", f": {error}") from error
  except UnicodeEncodeError as error:  # "\ud800" is valid JSON but not text
    raise BadTextError(where, "half a surrogate pair", f": {error}") from error
  return value


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


class Prompts:
  """The prompts of a file, read again whenever they are iterated.

  Attributes:
    sha256: of the texts, in order.
  """

  def __init__(self, file: str):
    """Reads the file once, so that mistakes in it are known before the work.

    Args:
      file: rows with the field "prompt", in any form that `read_documents`
        reads but plain text, whose lines could be meant in several ways.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it cannot be read.
      ValueError: it is plain text, a row has no prompt (the message names the
        line), or there is none.
    """
    self._pieces = list(itertools.chain(*list_pieces([file], _ONE_PIECE)))
    for piece in self._pieces:
      if file_format(piece.file)[0] == "text":
        raise ValueError(
          f"{piece.file}: plain text is not taken as prompts; write a file "
          '.jsonl with one JSON object a line, such as {"prompt": "TEXT"}'
        )
    digest, self._count = hashlib.sha256(), 0
    for text in self:
      content = text.encode()
      digest.update(len(content).to_bytes(8, "little") + content)
      self._count += 1
    if not self._count:
      raise ValueError(f"{file}: holds no prompt")
    self.sha256 = digest.hexdigest()

  def __len__(self) -> int:
    return self._count

  def __iter__(self) -> Iterator[str]:
    return read_texts(self._pieces, PROMPT)
