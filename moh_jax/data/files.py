"""Input files, local or at an address, and the documents and rows in them.

An address has a protocol, such as "hf://datasets/NAME/data.parquet" (the
Hugging Face Hub), "s3://..." or "memory://...", and goes through fsspec. The
libraries for it are optional: pip installs them as extras.

The suffix decides what a file is; ".gz" or ".zst" may follow that of text.
".jsonl", ".ndjson" and ".json" hold one JSON object per line, or ".json" one
list of objects; ".parquet" and ".arrow" hold a table, and any other file is
plain text that forms one document.
"""

import codecs
import collections
import concurrent.futures
import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import fsspec
import xxhash

from moh_jax.runtime.alive import alive

# What identifies data, so that a change is noticed: two streams with the same
# identity, config and seed have the same examples in the same order.
Identity = dict[str, int | str]
StrPath = str | os.PathLike
_THREADS, _FILES_AT_ONCE = 16, 4096  # that look at the sizes of files
_JSON, _LINES = (
  tuple(suffix + packing for suffix in kinds for packing in ("", ".gz", ".zst"))
  for kinds in ((".json",), (".jsonl", ".ndjson"))
)
TABLES = (".parquet", ".arrow")
ROW_SUFFIXES = (*_JSON, *_LINES, *TABLES)  # of files of rows with fields
_ROWS = 64  # of a Parquet table that are read into memory at one time
# Words in the names of files or folders, and the split that they mean.
SPLIT_WORDS = {
  **dict.fromkeys(("train", "training"), "train"),
  **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
  **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(r"(?<![a-z])(" + "|".join(SPLIT_WORDS) + r")(?![a-z])")
_NO_DATA = re.compile(
  r"(^|/)(\.|cache-|metadata\.|state\.json|dataset_(info|dict)\.json)"
)


class MissingLibraryError(ValueError):
  """An optional library is not installed."""


class BadTextError(ValueError):
  """A line or row that holds no text; the message names file and number."""


def import_extra(library: str, purpose: str, extra: str = "llm") -> Any:
  """Imports an optional library, or says how to install it.

  Args:
    library: name of the module, such as "pyarrow.parquet".
    purpose: what needs the library, such as a file name, for the message.
    extra: name of the extra in pyproject.toml that installs it.

  Raises:
    MissingLibraryError: the library is not installed.
  """
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    name = library.partition(".")[0]
    raise MissingLibraryError(
      f"{purpose} needs the library {name!r}: pip install '.[{extra}]' in the "
      "clone of moh_jax"
    ) from error


def list_files(patterns: Sequence[str]) -> list[str]:
  """Finds the files of paths, addresses and patterns.

  Args:
    patterns: paths or addresses, each also with *, ? and ** (any number of
      folders).

  Returns:
    Absolute paths and addresses, sorted, each once.

  Raises:
    FileNotFoundError: a pattern matches no file.
    OSError: a file system cannot be read, or its library is missing.
  """
  files: set[str] = set()
  for pattern in patterns:
    try:
      found = _find(pattern)
    except Exception as error:  # each file system has errors of its own
      raise OSError(f"{pattern}: cannot be read: {error}") from error
    if not found:
      what = "no such file"
      if os.path.isdir(pattern):
        what = f"is a folder; give its files, '{pattern.rstrip('/')}/**/*'"
      raise FileNotFoundError(f"{pattern}: {what}")
    files.update(found)
  return sorted(files)


def _find(pattern: str) -> list[str]:
  if "://" not in pattern:
    path = os.path.abspath(os.path.expanduser(pattern))
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    return [file for file in found if os.path.isfile(file)]
  system, path = fsspec.url_to_fs(pattern)
  found = system.glob(path, detail=True)
  files = [name for name, info in found.items() if info["type"] == "file"]
  return [system.unstrip_protocol(name) for name in files]


def files_by_split(
  root: StrPath, suffixes: tuple[str, ...]
) -> collections.defaultdict[str, list[str]]:
  """The files in a local folder and below by the split that their names tell.

  The name of a file, else of the folder nearest to it, tells the split. It is
  "train", "val" or "test", and "" where no name tells one. Where only a test
  split could be held out, its files are those of "val" too. What is hidden is
  left out, and what `datasets` writes beside its tables.

  Returns:
    Paths below `root` of the files with a suffix, in order.
  """
  found = collections.defaultdict(list)
  for path in sorted(pathlib.Path(root).rglob("*")):
    name = path.relative_to(root).as_posix()
    if name.lower().endswith(suffixes) and not _NO_DATA.search(name):
      words = map(_WORD.findall, reversed(name.lower().split("/")))
      word = next(filter(None, words), [""])[0]
      found[SPLIT_WORDS.get(word, "")].append(name)
  if "val" not in found and "test" in found:
    found["val"] = found["test"]
  return found


def file_size(file: str) -> int:
  """Bytes of a file."""
  system, path = fsspec.url_to_fs(file)
  return system.size(path)


@alive("reading the sizes of the files")
def fingerprint_of(root: StrPath, names: Sequence[str], facts: bytes) -> str:
  """A hash of the names and sizes of files, in order, and of further facts.

  A file of equal name and length counts as the same.
  """

  def sizes(start: int) -> list[int]:
    paths = (os.path.join(root, n) for n in names[start:][:_FILES_AT_ONCE])
    # -1 is a broken link.
    return [os.stat(x).st_size if os.path.exists(x) else -1 for x in paths]

  listed = "\n".join(names).encode(errors="surrogateescape")
  state = xxhash.xxh3_128(listed + b"\0" + facts)
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    for part in pool.map(sizes, range(0, len(names), _FILES_AT_ONCE)):
      state.update(str(part).encode())
  return state.hexdigest()


@contextlib.contextmanager
def _opened(file: str) -> Iterator[io.BufferedReader]:
  """Opens a file for reading its content, which .gz and .zst files unpack to.

  Raises:
    ValueError: the file cannot be read, or what is read of it inside of the
      context is cut off or damaged; or an optional library is missing.
  """
  opens: Any = fsspec.open if "://" in file else open
  try:
    with opens(file, "rb") as stream:
      if file.lower().endswith(".gz"):
        stream = gzip.GzipFile(fileobj=stream)
      elif file.lower().endswith(".zst"):
        stream = _Unpacked(_unpack(stream, import_extra("zstandard", file)))
      yield io.BufferedReader(stream)
  except (BadTextError, MissingLibraryError):
    raise
  except Exception as error:  # of file systems, of unpacking, of tables
    raise ValueError(f"{file}: damaged or cannot be read: {error}") from error


def _unpack(stream: IO[bytes], library: Any) -> Iterator[bytes]:
  """Parts of what the Zstandard frames of a stream hold.

  The library's own reader takes a frame that is cut off for a whole one.
  """
  # The largest window is that of `zstd --long=31`, as archives have it.
  unpacker = library.ZstdDecompressor(max_window_size=1 << 31)
  packed, frame = b"", None
  while packed := packed or stream.read(1 << 12):  # MiB when unpacked, perhaps
    frame = frame or unpacker.decompressobj()
    if part := frame.decompress(packed):
      yield part
    packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
  if frame:
    raise EOFError("it ends within a frame")


class _Unpacked(io.RawIOBase):
  """A stream of parts."""

  def __init__(self, parts: Iterator[bytes]):
    self._parts, self._part = parts, memoryview(b"")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    self._part = self._part or memoryview(next(self._parts, b""))
    count = min(len(buffer), len(self._part))
    buffer[:count], self._part = self._part[:count], self._part[count:]
    return count


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
  is_table = file.lower().endswith(TABLES)
  with _opened(file) as stream:
    rows = _table(file, stream, columns) if is_table else _json(file, stream)
    for number, row in rows:
      yield (place := f"{file}:{number}"), _object(row, place)


def _json(file: str, stream: Any) -> Iterator[tuple[int, Any]]:
  """Numbers and lines, or entries of the list that the file is."""
  if stream.peek(1).startswith(codecs.BOM_UTF8):  # some programs add it
    stream.read(len(codecs.BOM_UTF8))
  is_list = stream.peek(1).lstrip().startswith(b"[")
  if is_list and file.lower().endswith(_JSON):
    yield from enumerate(json.load(stream), 1)
    return
  for number, line in enumerate(stream, 1):
    if not line.isspace():
      yield number, line


def _table(
  file: str, stream: Any, columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Numbers and rows; what is null within their fields is left out."""
  if file.lower().endswith(".parquet"):
    parquet = import_extra("pyarrow.parquet", file)
    table = parquet.ParquetFile(stream, page_checksum_verification=True)
    names = table.schema_arrow.names
    batches = table.iter_batches(_ROWS, columns=columns, use_threads=False)
  else:
    batches = import_extra("pyarrow.ipc", file).open_stream(stream)
    names = batches.schema.names
  if missing := set(columns or ()) - set(names):
    raise BadTextError(f"{file}: no column {min(missing)!r}, found {names}")
  number = 0
  for batch in batches:
    for row in (batch.select(columns) if columns else batch).to_pylist():
      number += 1
      yield number, {k: without_nulls(x, deep=True) for k, x in row.items()}


def _object(row: Any, place: str) -> Any:
  """An object, also of its line of JSON, or the error that it is."""
  try:
    row = json.loads(row) if isinstance(row, bytes) else row
  except json.JSONDecodeError as error:  # its line is that of the row
    why = f"{error.msg} at character {error.pos + 1}"
    return BadTextError(f"{place}: not JSON: {why}")
  except ValueError as error:  # of UTF-8
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
    columns = [field] if file.lower().endswith(TABLES) else None
    for place, row in read_rows(file, columns):
      yield place, _text(row, field, place)
    return
  with _opened(file) as stream:
    content = stream.read()
  try:
    yield file, content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    yield file, BadTextError(f"{file}: not UTF-8: {error}")


def _text(
  row: dict[str, Any] | BadTextError, field: str, place: str
) -> str | BadTextError:
  """The text of a row, or the error that it is."""
  if isinstance(row, BadTextError):
    return row
  if field not in row:
    return BadTextError(f"{place}: no field {field!r}, found {sorted(row)}")
  text = "" if row[field] is None else row[field]
  try:
    text.encode()
  except AttributeError:
    return BadTextError(f"{place}: {field!r} is {type(text).__name__}, no text")
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
    raise ValueError(f'{plain[0]}: must be .jsonl, {{"prompt": "..."}} a line')
  prompts = list(read_texts(files, "prompt"))
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
