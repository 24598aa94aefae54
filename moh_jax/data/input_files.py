"""Input files, local or at an address: finding, opening, unpacking.

An address has a protocol, such as "hf://datasets/NAME/data.parquet" (the
Hugging Face Hub), "s3://..." or "memory://...", and goes through fsspec. A
folder that `save_to_disk` of the library `datasets` wrote stands for the Arrow
files in it. The libraries for it are optional: pip installs them as extras.
"""

import collections
import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

import fsspec

# Words in the names of files or folders, and the split that they mean.
SPLIT_WORDS = {
  **dict.fromkeys(("train", "training"), "train"),
  **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
  **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(r"(?<![a-z])(" + "|".join(SPLIT_WORDS) + r")(?![a-z])")
_NO_DATA = re.compile(r"(^|/)(\.|cache-|metadata\.|state\.json|dataset_)")


class MissingLibraryError(ValueError):
  """An optional library is not installed."""


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
    raise MissingLibraryError(
      f"{purpose} needs the library {library.partition('.')[0]!r}: pip install "
      f"'moh_jax[{extra}]'"
    ) from error


def list_files(patterns: Sequence[str]) -> list[str]:
  """Finds the files of paths, addresses, patterns and saved data sets.

  Args:
    patterns: paths or addresses, each also with *, ? and ** (any number of
      folders), or a folder that `save_to_disk` wrote.

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
      text = f"{pattern}: cannot be read: {error}"
      if isinstance(error, ImportError):
        text += "; hf:// needs pip install 'moh_jax[llm]'"
      raise OSError(text) from error
    if not found:
      raise FileNotFoundError(
        f"{pattern}: no such file; of a folder give DIR/**/*, of a saved data "
        "set with splits DIR/train"
      )
    files.update(found)
  return sorted(files)


def files_by_split(
  root: str | os.PathLike, suffixes: tuple[str, ...]
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
  if not _is_address(file):
    return os.path.getsize(file)
  system, path = fsspec.url_to_fs(file)
  return system.size(path)


@contextlib.contextmanager
def opened(file: str) -> Iterator[io.BufferedReader]:
  """Opens a file for reading its content, which .gz and .zst files unpack to.

  A file that is cut off, or damaged, raises an error when that place is read.
  """
  with contextlib.ExitStack() as stack:
    if _is_address(file):
      stream: Any = stack.enter_context(fsspec.open(file, "rb"))
    else:
      stream = stack.enter_context(open(file, "rb"))
    if file.lower().endswith(".gz"):
      stream = gzip.GzipFile(fileobj=stream)
    elif file.lower().endswith(".zst"):
      library = import_extra("zstandard", file)
      stream = _Unpacked(_unpack(stream, library))
    is_buffered = isinstance(stream, io.BufferedReader)
    yield stream if is_buffered else io.BufferedReader(stream)


def _is_address(file: str) -> bool:
  return "://" in file


def _find(pattern: str) -> list[str]:
  if not _is_address(pattern):
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(path):
      return _saved_files(path)
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    return [file for file in found if os.path.isfile(file)]
  system, path = fsspec.url_to_fs(pattern)
  if system.isdir(path):
    return _saved_files(pattern.rstrip("/"))
  infos = system.glob(path, detail=True)
  return [
    system.unstrip_protocol(name)
    for name, info in infos.items()
    if info["type"] == "file"
  ]


def _saved_files(folder: str) -> list[str]:
  """The tables of a data set that `save_to_disk` wrote; [] in other folders."""
  system, path = fsspec.url_to_fs(folder)
  state = f"{path}/state.json"
  if not system.isfile(state):
    return []
  stored = json.loads(system.cat_file(state))
  return [f"{folder}/{one['filename']}" for one in stored["_data_files"]]


def _unpack(stream: IO[bytes], library: Any) -> Iterator[bytes]:
  """Parts of what the Zstandard frames of a stream hold."""
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
