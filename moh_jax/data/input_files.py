"""Input files, local or at an address: finding, opening, unpacking, tables.

An address has a protocol, such as "hf://datasets/NAME/data.parquet" (the
Hugging Face Hub), "s3://..." or "memory://...", and goes through fsspec. A
folder that `save_to_disk` of the library `datasets` wrote stands for the Arrow
files in it. The libraries for it are optional: pip installs them as extras.
"""

import collections
import contextlib
import errno
import glob
import gzip
import importlib
import io
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

import msgspec

from moh_jax.runtime.files import DEFLATE_RATIO
from moh_jax.runtime.json_files import MAX_BYTES, FileName, parse_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
# Words in the names of files or folders, and the split that they mean.
SPLIT_WORDS = {
  **dict.fromkeys(("train", "training"), "train"),
  **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
  **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(r"(?<![a-z])(" + "|".join(SPLIT_WORDS) + r")(?![a-z])")
_MOST_UNPACKED = 1 << 25  # bytes that any small file may unpack to
_MOST_OF_TABLE, _RATIO = 1 << 28, 256  # bytes of a small table, of others
_MOST_ROWS, _ROWS_PER_BYTE = 1 << 20, 8  # of a small table, of others
_DEEP = "/**/"  # of a pattern: any number of folders


class _Splits(msgspec.Struct):
  splits: list[FileName]


class _DataFile(msgspec.Struct):
  filename: FileName


class _State(msgspec.Struct):
  files: list[_DataFile] = msgspec.field(name="_data_files")


def import_extra(library: str, purpose: str, extra: str = "llm") -> Any:
  """Imports an optional library, or says how to install it.

  Args:
    library: name of the module, such as "pyarrow.parquet".
    purpose: what needs the library, such as a file name, for the message.
    extra: name of the extra in pyproject.toml that installs it.

  Raises:
    ValueError: the library is not installed.
  """
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{purpose} needs the library {library.partition('.')[0]!r}: pip install "
      f"'moh_jax[{extra}]'"
    ) from error


def is_address(file: str) -> bool:
  """Whether a path names a file system, as in "hf://datasets/a/b.jsonl"."""
  return "://" in file


def list_files(patterns: Sequence[str]) -> list[str]:
  """Finds the files of paths, addresses, patterns and saved data sets.

  Args:
    patterns: paths or addresses, each also with *, ? and ** (any number of
      folders), or a folder that `save_to_disk` wrote.

  Returns:
    Absolute paths and addresses, sorted, each once.

  Raises:
    FileNotFoundError: a pattern matches no file.
    OSError: a file system cannot be read.
    ValueError: a saved data set has several splits or is damaged, files and
      addresses are mixed, or a library is missing.
  """
  files: set[str] = set()
  for pattern in patterns:
    found = _find_remote(pattern) if is_address(pattern) else _find(pattern)
    if not found:
      hint = "; of a folder, give DIR/**/*" if os.path.isdir(pattern) else ""
      raise FileNotFoundError(f"{pattern}: no such file{hint}")
    files.update(found)
  if not files:
    raise FileNotFoundError("no input file was given")
  if len({is_address(file) for file in files}) > 1:
    raise ValueError(
      f"local files and addresses cannot be mixed, as in {list(patterns)}; "
      "write local ones as file:///PATH"
    )
  return sorted(files)


def files_by_split(
  root: str | os.PathLike, suffixes: tuple[str, ...]
) -> collections.defaultdict[str, list[str]]:
  """The files of `walk` by the split that their names tell, in order.

  The name of a file, else of the folder nearest to it, tells the split. It is
  "train", "val" or "test", and "" where no name tells one. Where only a test
  split could be held out, its files are those of "val" too.
  """
  found = collections.defaultdict(list)
  for name in walk(root, suffixes):
    parts = reversed(name.lower().split("/"))
    words = next(filter(None, map(_WORD.findall, parts)), None)
    found[SPLIT_WORDS[words[0]] if words else ""].append(name)
  if "val" not in found and "test" in found:
    found["val"] = found["test"]
  return found


def walk(root: str | os.PathLike, suffixes: tuple[str, ...]) -> Iterator[str]:
  """Paths below a local folder of the files with a suffix in it, in order.

  Hidden files are left out. Of a folder that `save_to_disk` wrote, the files
  are those that its state.json lists.
  """
  root = os.path.abspath(root)
  for where, below, names in os.walk(root):
    below[:] = sorted(name for name in below if not name.startswith("."))
    files = [
      os.path.join(where, name)
      for name in sorted(names)
      if name.lower().endswith(suffixes) and not name.startswith(".")
    ]
    if files and _STATE in names:
      files = list_files([where])
    for file in files:
      yield pathlib.Path(file).relative_to(root).as_posix()


def file_size(file: str) -> int:
  """Bytes of a file."""
  if not is_address(file):
    return os.path.getsize(file)
  with _remote(file) as (system, path):
    return system.size(path)


def open_file(file: str) -> IO[bytes]:
  """Opens a file for reading."""
  if not is_address(file):
    return pathlib.Path(file).open("rb")
  with _remote(file) as (system, path):
    return io.BufferedReader(_RemoteFile(system.open(path, "rb"), file))


def open_unpacked(file: str, packing: str) -> IO[bytes]:
  """Opens a file that may be packed, for reading its content.

  What could be unpacked before a file's damage, or before the place where it
  was cut off, is read before the error.

  Args:
    file: path or address.
    packing: ".gz", ".zst" or "".

  Raises:
    OSError: the file cannot be opened.
    ValueError: a library is missing.
  """
  if packing == ".zst":
    most = max(DEFLATE_RATIO * file_size(file), _MOST_UNPACKED)
    return io.BufferedReader(_Unpacked(file, most))
  stream = open_file(file)
  if not packing:
    return stream
  unpacked = gzip.GzipFile(fileobj=stream)
  unpacked.myfileobj = stream  # is closed with it
  return unpacked


@contextlib.contextmanager
def open_parquet(file: str) -> Iterator[Any]:
  """Opens a Parquet file as `pyarrow.parquet.ParquetFile`.

  Raises:
    ValueError: the file is damaged or states too many rows, or the library is
      missing.
  """
  pyarrow = import_extra("pyarrow", file)
  parquet = import_extra("pyarrow.parquet", file)
  with contextlib.ExitStack() as stack:
    source = stack.enter_context(open_file(file)) if is_address(file) else file
    try:
      opened = parquet.ParquetFile(source, page_checksum_verification=True)
      table = stack.enter_context(opened)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a bad footer
      raise ValueError(f"{file}: damaged or no Parquet: {error}") from error
    about = table.metadata
    check_rows(file, about.num_rows)
    groups = map(about.row_group, range(about.num_row_groups))
    total = sum(group.total_byte_size for group in groups)
    check_unpacked(file, total, file_size(file))
    yield table


def check_rows(file: str, rows: int) -> None:
  """Refuses a table that states more rows than its bytes may mean.

  Raises:
    ValueError: it does; equal rows need no bytes, and would be read for ever.
  """
  most = max(_MOST_ROWS, _ROWS_PER_BYTE * file_size(file))
  if rows > most:
    raise ValueError(f"{file}: {rows:,} rows, must be at most {most:,}")


def check_unpacked(file: str, unpacked: int, size: int) -> None:
  """Refuses a table that unpacks to more than tables of `size` bytes do.

  Raises:
    ValueError: it does.
  """
  most = max(_MOST_OF_TABLE, _RATIO * size)
  if unpacked > most:
    raise ValueError(
      f"{file}: unpacks to {unpacked:,} bytes, must be at most {most:,}"
    )


def _unpack(stream: IO[bytes], library: Any) -> Iterator[bytes]:
  """Parts of what the Zstandard frames of a stream hold."""
  # The largest window is that of `zstd --long=31`, as archives have it.
  unpacker = library.ZstdDecompressor(max_window_size=1 << 31)
  packed, frame = b"", None
  while packed := packed or stream.read(1 << 12):  # MiB when unpacked, perhaps
    frame = frame or unpacker.decompressobj()
    try:
      if part := frame.decompress(packed):
        yield part
    except library.ZstdError as error:
      raise OSError(str(error)) from error
    packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
  if frame:
    raise EOFError("it ends within a frame")


class _Unpacked(io.RawIOBase):
  """What a file of Zstandard holds, which has at most so many bytes."""

  def __init__(self, file: str, most: int):
    library, self._stream = import_extra("zstandard", file), open_file(file)
    self._parts, self._part = _unpack(self._stream, library), memoryview(b"")
    self._most = self._left = most

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    self._part = self._part or memoryview(next(self._parts, b""))
    count = min(len(buffer), len(self._part))
    buffer[:count], self._part = self._part[:count], self._part[count:]
    self._left -= count
    if self._left < 0:
      raise OSError(f"unpacks to more than {self._most:,} bytes")
    return count

  def close(self) -> None:
    if not self.closed:
      self._stream.close()
    super().close()


class _RemoteFile(io.RawIOBase):
  """A file of fsspec whose errors are OSErrors that name it."""

  def __init__(self, file: Any, address: str):
    self._file, self._address = file, address

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    with _remote_errors(self._address):
      content = self._file.read(len(buffer))
    buffer[: len(content)] = content
    return len(content)

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    with _remote_errors(self._address):
      return self._file.seek(offset, whence)

  def tell(self) -> int:
    return self._file.tell()

  def close(self) -> None:
    if not self.closed:
      self._file.close()
    super().close()


def _find(pattern: str) -> list[str]:
  path = os.path.abspath(os.path.expanduser(pattern))
  if os.path.isfile(path):
    return [path]
  if os.path.isdir(path):
    return _saved_files(path)
  found = _matches(f"{path}/*" if path.endswith("/**") else path)
  return [file for file in found if os.path.isfile(file)]


def _matches(pattern: str) -> Iterator[str]:
  """As `glob.glob`, but ** follows no links, which may lead in a circle."""
  above, deep, below = pattern.partition(_DEEP)
  if not deep:
    yield from glob.iglob(pattern)
    return
  for root in glob.iglob(above or "/"):
    for folder, names, _ in os.walk(root):
      names[:] = [name for name in names if not name.startswith(".")]
      yield from _matches(f"{glob.escape(folder)}/{below}")


def _find_remote(pattern: str) -> list[str]:
  with _remote(pattern) as (system, path):
    if system.isfile(path):
      return [system.unstrip_protocol(path)]
    is_folder = system.isdir(path)
    found = {} if is_folder else system.glob(path, detail=True)
  if is_folder:
    return _saved_files(pattern.rstrip("/"))
  return [
    system.unstrip_protocol(name)
    for name, info in found.items()
    if info["type"] == "file"
  ]


def _saved_files(folder: str) -> list[str]:
  """The files of a data set that `save_to_disk` wrote; [] in other folders."""
  stored = _read_saved(f"{folder}/{_SPLITS}", _Splits)
  splits = stored["splits"] if stored else []
  if len(splits) > 1:
    raise ValueError(
      f"{folder} holds the splits {splits}; name those to read, as in "
      f"{folder}/{splits[0]}"
    )
  if splits:
    folder = f"{folder}/{splits[0]}"
  state = _read_saved(f"{folder}/{_STATE}", _State)
  entries = state["_data_files"] if state else []
  files = [f"{folder}/{entry['filename']}" for entry in entries]
  for file in files:
    if not _is_file(file):
      raise FileNotFoundError(f"{file}: no such file, though {_STATE} names it")
  return files


def _read_saved(file: str, kind: type) -> dict[str, Any] | None:
  """Reads what describes a saved data set; None where there is no file."""
  if not _is_file(file):
    return None
  with open_file(file) as stream:
    return parse_json(stream.read(MAX_BYTES + 1), kind, file)


def _is_file(file: str) -> bool:
  if not is_address(file):
    return os.path.isfile(file)
  with _remote(file) as (system, path):
    return system.isfile(path)


@contextlib.contextmanager
def _remote(address: str) -> Iterator[tuple[Any, str]]:
  """Gives the file system of an address, and the path in it."""
  core = import_extra("fsspec.core", address)
  with _remote_errors(address):
    try:
      found = core.url_to_fs(address)
    except (ImportError, ValueError) as error:
      raise ValueError(
        f"{address}: {error}; hf:// needs pip install 'moh_jax[llm]', other "
        "protocols a library of their own"
      ) from error
    yield found


@contextlib.contextmanager
def _remote_errors(address: str) -> Iterator[None]:
  """Turns what a file system raises into an OSError that names the address."""
  try:
    yield
  except (FileNotFoundError, ValueError):
    raise
  except Exception as error:  # each file system has errors of its own
    wrapped = OSError(f"{address}: cannot be read: {error}")
    wrapped.errno = errno.EIO  # not damage of the content, see `damage`
    raise wrapped from error
