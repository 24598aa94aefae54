"""Sets of examples in array_record shards: their format, and reading them.

A set is a folder of NNNNN-of-NNNNN.array_record and metadata.json, which is
written last and says what the set holds and how large each shard is. A record
is one line of JSON, then bytes (of the kind "tokens": bytes alone). The folder
is local or mounted: array_record reads no buckets.

A process keeps half as many shards open as it may open files (`ulimit -n`), of
all sets together: those that were read last. Opening one again takes about two
milliseconds, so a set of more shards is read, but slower.
"""

import bisect
import collections
import itertools
import json
import os
import pathlib
import resource
import sys
import threading
import weakref
from typing import Any

from array_record.python import array_record_module

METADATA = "metadata.json"
VERSION = 1
# A reader's buffers are small, as records are read in any order.
_READER_OPTIONS = "readahead_buffer_size:0"
_BUFFER_BYTES = 32 << 10


def pack(header: dict[str, Any], payload: bytes) -> bytes:
  """A record: the header as one line of JSON, then the payload."""
  return json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload


def unpack(record: bytes) -> tuple[dict[str, Any], bytes]:
  """Inverse of `pack`.

  Raises:
    ValueError: the record does not begin with a line of JSON.
  """
  header, newline, payload = record.partition(b"\n")
  if not newline:
    raise ValueError("the record has no header")
  return json.loads(header), payload


def read_metadata(folder: str | os.PathLike, kind: str) -> dict[str, Any]:
  """What a set says of itself.

  Args:
    folder: where metadata.json stands.
    kind: "images", "latents" or "tokens", what is wanted.

  Raises:
    FileNotFoundError: there is no metadata.json.
    ValueError: it is damaged, of another kind or of another version.
  """
  path = pathlib.Path(folder) / METADATA
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no such file; it is written last, so either the set of {kind} "
      "is unfinished (run the command that writes it again) or it is elsewhere"
    )
  try:
    metadata = json.loads(path.read_text())
    found = metadata["format"], metadata["version"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path}: damaged, or not one of ours ({error})"
    ) from error
  if found != (kind, VERSION):
    raise ValueError(
      f"{path}: holds {found[0]!r} of version {found[1]}, expected {kind!r} of "
      f"version {VERSION}"
    )
  return metadata


class _OpenShards:
  """The open shards of this process, in the order in which they were used.

  A set owns its readers, so they disappear with it; here stands only whose they
  are. A reader is dropped, not closed: it closes its file when the last thread
  that reads from it is done.
  """

  def __init__(self):
    self._lock = threading.Lock()
    # By the set's identity and the shard's number.
    self._used: collections.OrderedDict[
      tuple[int, int], weakref.ref[Shards]
    ] = collections.OrderedDict()

  def reader(self, owner: "Shards", shard: int) -> Any:
    """A set's reader of one shard, opened if need be.

    Raises:
      RuntimeError: the shard cannot be opened.
    """
    key = id(owner), shard
    with self._lock:
      reader = owner.readers.get(shard)
      if reader is not None:
        self._used.move_to_end(key)
        return reader
    reader = _open_reader(owner.path(shard))  # slow: others go on meanwhile
    with self._lock:
      reader = owner.readers.setdefault(shard, reader)
      self._used[key] = weakref.ref(owner)
      self._used.move_to_end(key)
      while len(self._used) > _most_open():
        (_, oldest), user = self._used.popitem(last=False)
        if (user := user()) is not None:
          user.readers.pop(oldest, None)
    return reader


_OPEN = _OpenShards()


class Shards:
  """Random access to the records of a set; picklable, and safe in threads.

  Attributes:
    metadata: what the set says of itself.
    readers: its open shards, by number; `_OpenShards` looks after them.
  """

  def __init__(self, folder: str | os.PathLike, kind: str):
    """Opens a set.

    Args:
      folder: where metadata.json stands.
      kind: "images", "latents" or "tokens".

    Raises:
      FileNotFoundError: metadata.json or a shard is missing.
      ValueError: metadata.json does not fit, or a shard is truncated.
    """
    self.metadata = read_metadata(folder, kind)
    self._folder = pathlib.Path(folder)
    self._shards = self.metadata["shards"]
    self._check_files()
    counts = (shard["examples"] for shard in self._shards)
    self._ends = list(itertools.accumulate(counts))
    self.readers: dict[int, Any] = {}

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "readers": {}}

  def __len__(self) -> int:
    return self.metadata["examples"]

  def __getitem__(self, index: int) -> tuple[dict[str, Any], bytes]:
    """The header and the payload of one record.

    Raises:
      ValueError: the record is damaged; it is named.
    """
    record = self.record(index)
    try:
      return unpack(record)
    except ValueError as error:
      where = self.locate(index)
      raise ValueError(f"{where}: damaged record: {error}") from error

  def record(self, index: int) -> bytes:
    """One record as it was written.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; it is named.
    """
    shard, position = self._find(index)
    try:
      return _OPEN.reader(self, shard).read([position])[0]
    except (RuntimeError, ValueError, IndexError) as error:
      where = self.locate(index)
      raise ValueError(f"{where}: damaged record: {error}") from error

  def locate(self, index: int) -> str:
    """The shard and the position of a record in it, as text."""
    shard, position = self._find(index)
    return f"{self.path(shard)}[{position}]"

  def path(self, shard: int) -> pathlib.Path:
    """The file of a shard."""
    return self._folder / self._shards[shard]["file"]

  def _find(self, index: int) -> tuple[int, int]:
    """The shard of a record and its position in it."""
    if not 0 <= index < len(self):
      raise IndexError(f"index={index} of {len(self)} records")
    shard = bisect.bisect_right(self._ends, index)
    return shard, index - self._ends[shard] + self._shards[shard]["examples"]

  def _check_files(self):
    missing, other = [], []
    for shard in self._shards:
      path = self._folder / shard["file"]
      if not path.is_file():
        missing.append(shard["file"])
      elif path.stat().st_size != shard["bytes"]:
        other.append(f"{shard['file']} ({path.stat().st_size} bytes)")
    if missing:
      raise FileNotFoundError(
        f"{self._folder} lacks {len(missing)} of its {len(self._shards)} "
        f"shards: {_some(missing)}"
      )
    if other:
      raise ValueError(
        f"{self._folder}: {len(other)} shard(s) are truncated or not of this "
        f"set: {_some(other)}"
      )


def _open_reader(path: pathlib.Path) -> Any:
  reader = array_record_module.ArrayRecordReader(
    str(path), options=_READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
  )
  if not reader.ok():  # says so only when it is used
    reader.close()
  return reader


def _most_open() -> int:
  files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, 1)


def _some(names: list[str]) -> str:
  more = f" and {len(names) - 5} more" if len(names) > 5 else ""
  return ", ".join(names[:5]) + more
