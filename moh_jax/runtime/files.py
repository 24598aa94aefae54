"""Files that are whole or absent when written, and bounded when read.

The headers of npz files may lie about what follows: the sizes that an archive
states are checked against memory and against the file's length before an array
is made; `zipfile` never unpacks more than it states.
"""

import collections
import contextlib
import csv
import errno
import fcntl
import functools
import io
import math
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import xxhash
from etils import epath

# Deflate, as in zip and PNG files, makes at most this many bytes of one.
DEFLATE_RATIO = 1032
# Also Unicode's ends of lines and turns of direction, and what XML forbids.
_CONTROL = re.compile(
  r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufffe\uffff]"
)
_CHUNK = 1 << 20
# Names of `temporary_beside`: of which file, machine and process.
_LEFT = re.compile(r"(?s)\..+\.([0-9a-f]{4})-([0-9a-f]{1,7})-[0-9a-f]{6}\.tmp")
# First characters of formulas in CSV, also wide ones, and of what is quoted.
_QUOTED = frozenset("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20'")
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS


@contextlib.contextmanager
def disk_errors(what: str, whole: str) -> Iterator[None]:
  """Turns errors of writing into an OSError that says how to continue.

  Args:
    what: what is being written, for example "a shard".
    whole: what is whole whatever happens, for example "the others are".
  """
  try:
    yield
  except (RuntimeError, OSError) as error:  # array_record raises RuntimeError
    raise OSError(
      f"{what} cannot be written: {error}; {whole} whole: make space and run "
      "the same command again"
    ) from error


def check_regular(path: str | os.PathLike) -> None:
  """Refuses what is no file, such as a pipe, which would block for ever.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is a folder, a pipe, a socket or a device.
  """
  try:
    mode = os.stat(path).st_mode
  except (FileNotFoundError, NotADirectoryError, ValueError) as error:
    # ValueError: the name holds a null byte.
    raise FileNotFoundError(f"{os.fspath(path)}: no such file") from error
  if not stat.S_ISREG(mode):
    kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
    raise ValueError(f"{os.fspath(path)}: is a {kind}, must be a file")


def read_bytes(path: str | os.PathLike, most: int) -> bytes:
  """Reads a file of at most `most` bytes.

  Args:
    path: local, or an `epath` path in a bucket.
    most: bytes that are allowed.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no file, or larger.
  """
  if "://" not in os.fspath(path):
    check_regular(path)
  with epath.Path(path).open("rb") as file:
    content = file.read(most + 1)
  if len(content) > most:
    raise ValueError(f"{os.fspath(path)}: must be at most {most:,} bytes")
  return content


def checksum(path: Any) -> tuple[str, int]:
  """Sums up a whole file.

  Args:
    path: `pathlib` or `epath` path, also in a bucket.

  Returns:
    XXH3 of 128 bits, in hexadecimal, and the length in bytes.
  """
  state, length = xxhash.xxh3_128(), 0
  with path.open("rb") as stream:
    while chunk := stream.read(_CHUNK):
      state.update(chunk)
      length += len(chunk)
  return state.hexdigest(), length


def check_writable(path: str | os.PathLike, what: str) -> None:
  """Checks that a file or folder can be written, before long work is lost.

  Nothing stays behind: the file that is tried has no name.

  Args:
    path: local; its folder may not exist yet.
    what: names the option, for the message.

  Raises:
    OSError: it cannot be written.
  """
  place = pathlib.Path(path).expanduser().absolute()
  if place.is_symlink() and not place.exists():
    raise OSError(f"{what} {path}: is a link to nothing; remove it")
  place = pathlib.Path(os.path.realpath(place))
  if place.exists() and not place.is_dir():
    if not os.access(place, os.W_OK):
      raise PermissionError(f"{what} {path}: cannot be written")
    if not place.is_file():  # a device, such as /dev/stdout
      return
  while not place.is_dir():
    place = place.parent
    if place.is_file():
      raise NotADirectoryError(f"{what} {path}: {place} is a file, no folder")
  try:
    with tempfile.TemporaryFile(dir=place):
      pass
  except OSError as error:
    raise OSError(
      f"{what} {path}: {place} cannot be written: {error}"
    ) from error


def inside(folder: str | os.PathLike, name: str, what: str) -> pathlib.Path:
  """The path of a name that must stay inside a folder.

  Args:
    folder: which.
    name: relative to it, as a file or an option says it.
    what: names the file or option, for the message.

  Raises:
    ValueError: the name is empty, absolute, or goes up by "..".
  """
  path = pathlib.PurePath(name)
  if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
    raise ValueError(f"{what}={name!r} must be a name inside {folder}")
  return pathlib.Path(folder, name)


@contextlib.contextmanager
def only_writer(path: str | os.PathLike) -> Iterator[None]:
  """Keeps other processes of this machine from writing where this one does.

  Args:
    path: file or folder, which exists; file systems without locks are left.

  Raises:
    OSError: another process has it.
  """
  # Network file systems lock only what is open for writing.
  mode = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR
  descriptor = os.open(path, mode | os.O_CLOEXEC)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise OSError(f"{path}: another process is writing it") from None
    except OSError:
      pass
    yield
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def named_errors(
  path: str | os.PathLike, temporary: Any = None
) -> Iterator[None]:
  """Names `path` in errors of a full disk that name no file, or `temporary`."""
  try:
    yield
  except OSError as error:
    inner = os.fspath(temporary or path)
    is_ours = os.fsdecode(error.filename or inner).startswith(inner)
    if error.errno in _FULL and is_ours:
      raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Gives a path to write to; what is there at the end takes `path`'s place.

  After an error, or a kill, `path` is what it was.

  Args:
    path: file to write or replace; its directory must exist.

  Raises:
    OSError: it cannot be written, as on a full disk; names `path`.
    ValueError: it is a folder, a pipe, a socket or a device.
  """
  path = pathlib.Path(path)
  if path.exists():
    check_regular(path)
  temporary = temporary_beside(path)
  try:
    with named_errors(path, temporary):
      yield temporary
      with temporary.open("r+b") as file:
        os.fsync(file.fileno())
      os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def temporary_beside(path: pathlib.Path) -> pathlib.Path:
  """A new name, for what takes the place of `path` when it is whole.

  The first one in a folder removes what processes left there that were killed
  on this machine since it was started.
  """
  _remove_left(path.parent.absolute())
  own = f"{_machine()}-{os.getpid():x}-{uuid.uuid4().hex[:6]}"
  return path.with_name(f".{path.name}.{own}.tmp")


@functools.cache
def _remove_left(folder: pathlib.Path) -> None:
  for left in folder.glob(".*.tmp"):
    found = _LEFT.fullmatch(left.name)
    if found and found[1] == _machine() and not _lives(int(found[2], 16)):
      with contextlib.suppress(OSError):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def boot() -> str:
  """Identifies this machine since it was started."""
  try:
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip()
  except OSError:
    return f"{socket.gethostname()} {uuid.getnode()}"


@functools.cache
def _machine() -> str:
  """Tells where a process id means the same: boot and namespace."""
  where = boot()
  with contextlib.suppress(OSError):  # as on macOS
    where += os.readlink("/proc/self/ns/pid")
  return xxhash.xxh3_64_hexdigest(where.encode())[:4]


def _lives(process: int) -> bool:
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except OSError:
    pass  # that of another user
  return True


def remove_files(folder: pathlib.Path, *patterns: str) -> None:
  """Removes files by name in order, then the folder if it has no others.

  Args:
    folder: that a command wrote; it need not exist.
    patterns: of the names of what it wrote. What a kill left of `replacing`
      such a file goes too.
  """
  for pattern in patterns:
    for name in (f".{pattern}.*.tmp", pattern):
      for file in folder.glob(name):
        file.unlink(missing_ok=True)
  with contextlib.suppress(OSError):
    folder.rmdir()


def write_whole(path: Any, content: bytes) -> None:
  """Writes a file that takes an old one's place when it is whole.

  Args:
    path: `pathlib` or `epath` path to write or replace, also in a bucket; its
      directory must exist. What is no file, such as /dev/stdout, is written to.
    content: of the file.
  """
  if "://" in os.fspath(path):  # buckets always write complete files
    path.write_bytes(content)
    return
  if number := _STREAMS.get(os.fspath(path)):  # which may be files by now
    sys.stdout.flush()
    with named_errors(path), open(number, "wb", closefd=False) as stream:
      stream.write(content)
    return
  path = pathlib.Path(path)
  if path.exists() and not path.is_file():
    with named_errors(path):
      path.write_bytes(content)
    return
  with replacing(path) as temporary:
    temporary.write_bytes(content)


def printable(text: str, kept: str = "\n\t") -> str:
  """Text whose control characters are written as text.

  Names in files may hold sequences that change what a terminal shows or does.

  Args:
    text: any.
    kept: control characters that stay.
  """

  def written(found: re.Match[str]) -> str:
    code = ord(found[0])
    if found[0] in kept:
      return found[0]
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}"

  return _CONTROL.sub(written, text)


def printable_name(name: str) -> str:
  """A name as text on one line, with "?" for bytes that are not UTF-8."""
  return printable(name.encode(errors="replace").decode(), kept="")


def write_csv(
  path: str | os.PathLike, header: Sequence[str], rows: Iterable[Iterable[Any]]
) -> None:
  """Writes a table as a CSV file, whole or not at all.

  Text that spreadsheets take for a formula gets an apostrophe before it, and so
  does text that begins with one.
  """
  text = io.StringIO()
  csv.writer(text).writerows([map(_csv_cell, row) for row in [header, *rows]])
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, text.getvalue().encode(errors="surrogateescape"))


def _csv_cell(value: Any) -> Any:
  if isinstance(value, str) and value[:1] in _QUOTED:
    with contextlib.suppress(ValueError):
      float(value)
      return value
    return f"'{value}"
  return value


Header = tuple[tuple[int, ...], bool, np.dtype]


def npz_names(path: str | os.PathLike) -> tuple[str, ...]:
  """Names of the arrays of an npz file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not an npz archive, or a damaged one.
  """
  with _open(path) as archive:
    return tuple(name.removesuffix(".npy") for name in archive.namelist())


def read_npz(
  path: str | os.PathLike, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
  """Reads arrays of an npz file; pickled ones are refused.

  Args:
    path: the file.
    names: of the arrays; None reads all.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the archive is damaged, lacks an array, or has arrays that do
      not fit into memory.
  """
  names = npz_names(path) if names is None else tuple(names)
  arrays = {}
  for name in names:
    with open_member(path, name) as (stream, (shape, fortran, dtype)):
      with npz_damage(path):
        data = np.frombuffer(stream.read(), dtype)
        arrays[name] = data.reshape(shape, order="F" if fortran else "C")
  return arrays


@contextlib.contextmanager
def open_member(
  path: str | os.PathLike, name: str
) -> Iterator[tuple[IO[bytes], Header]]:
  """Opens an array of an npz file.

  Yields:
    A stream at the first byte of the data, and the array's shape, whether it
    is in Fortran order, and its dtype, which together fit the stream's length.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the archive is damaged, or the array is none of plain numbers.
  """
  with _open(path) as archive, contextlib.ExitStack() as stack:
    with npz_damage(path):
      info = archive.getinfo(f"{name}.npy")
      stream = stack.enter_context(archive.open(info))
      version = np.lib.format.read_magic(stream)
      # Version 3 differs in text that only names of fields need.
      read = np.lib.format.read_array_header_2_0
      if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
      header = shape, _, dtype = read(stream)
      if dtype.hasobject:
        raise ValueError(f"{name} has dtype object, which is never read")
      left = info.file_size - stream.tell()
      needed = math.prod(shape) * dtype.itemsize
      if min(shape, default=0) < 0 or needed != left:
        raise ValueError(
          f"{name} has {left} bytes, its shape {shape} needs {needed}"
        )
    yield stream, header


@contextlib.contextmanager
def npz_damage(path: str | os.PathLike) -> Iterator[None]:
  """Names the file in the errors of a damaged archive."""
  try:
    yield
  except Exception as error:  # a damaged archive raises nearly anything
    # A damaged file may say to read at a place that there cannot be.
    failed = isinstance(error, OSError) and error.errno != errno.EINVAL
    if failed or isinstance(error, MemoryError):  # which says nothing of it
      raise
    raise ValueError(f"{path}: damaged npz file: {error}") from error


@contextlib.contextmanager
def _open(path: str | os.PathLike) -> Iterator[zipfile.ZipFile]:
  path = pathlib.Path(path)
  try:
    check_regular(path)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"{path}: no such file; expected an npz file or a folder of images"
    ) from error
  path.open("rb").close()  # `is_zipfile` hides that it cannot be read
  if not zipfile.is_zipfile(path):
    raise ValueError(f"{path}: not an npz file, or a truncated one")
  with contextlib.ExitStack() as stack:
    with npz_damage(path):
      archive = stack.enter_context(zipfile.ZipFile(path))
      check_ratio(archive, path.stat().st_size, DEFLATE_RATIO)
      check_once(archive.namelist())
    yield archive


def check_once(names: Iterable[str]) -> None:
  """Refuses names of which one would hide another.

  Raises:
    ValueError: a name stands twice.
  """
  for name, count in collections.Counter(names).items():
    if count > 1:
      raise ValueError(f"{name!r} stands in it {count} times")


def check_ratio(archive: zipfile.ZipFile, size: int, most: int) -> None:
  """Refuses a zip file whose members share their bytes or unpack to too much.

  Args:
    archive: the open file.
    size: its bytes.
    most: bytes that one byte of it may become.

  Raises:
    ValueError: the members together have more.
  """
  unpacked = sum(info.file_size for info in archive.infolist())
  if unpacked > most * size:
    raise ValueError(
      f"unpacks to {unpacked:,} bytes, more than {most} times its {size:,}"
    )
