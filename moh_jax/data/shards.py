"""Sets of examples in array_record shards: the format, and random access.

A set is a folder of files NNNNN-of-NNNNN.array_record and a metadata.json,
which is written last and states what the set holds and the size of each shard.
A record is one line of JSON and then bytes; sets of the kind "tokens" have
records of bytes alone. The folder must be local or mounted, as array_record
reads no buckets.

A process keeps open the shards that it used last, of all sets together at most
half as many as it may open files (`ulimit -n`). Opening a shard again takes
about two milliseconds, so sets with more shards can be read, but slower.
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

from moh_jax.data.identity import Identity, of_shards
from moh_jax.data.set_schema import SCHEMAS, SUMS, Head, Header
from moh_jax.files import checksum
from moh_jax.json_files import check_json, parse_json, read_json

METADATA = "metadata.json"
VERSION = 1
# Small buffers, since records are read in random order.
_READER_OPTIONS = "readahead_buffer_size:0"
_BUFFER_BYTES = 32 << 10
_MAX_HEADER = 1 << 16
_MAX_METADATA = 1 << 30  # a million shards have 200 MB


def pack(header: dict[str, Any], payload: bytes) -> bytes:
  """Makes a record: the header as one line of JSON, then the payload."""
  return json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload


def unpack(record: bytes) -> tuple[dict[str, Any], bytes]:
  """Splits a record that `pack` made into header and payload.

  Raises:
    ValueError: the record does not begin with a line of JSON that has a label.
  """
  header, newline, payload = record.partition(b"\n")
  if not newline:
    raise ValueError("the record has no header")
  return parse_json(header, Header, "its header", _MAX_HEADER), payload


def read_metadata(folder: str | os.PathLike, kind: str) -> dict[str, Any]:
  """Reads and checks the metadata.json of a set.

  Args:
    folder: folder of the set.
    kind: expected kind: "images", "latents" or "tokens".

  Raises:
    FileNotFoundError: there is no metadata.json.
    ValueError: it is damaged, or states another kind or version.
  """
  path = pathlib.Path(folder) / METADATA
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no such file; it is written last, so either the set of {kind} "
      "is unfinished (run the command that writes it again) or it is elsewhere"
    )
  metadata = read_json(path, Head, _MAX_METADATA)
  found = metadata["format"], metadata["version"]
  if found != (kind, VERSION):
    raise ValueError(
      f"{path}: holds {found[0]!r} of version {found[1]}, expected {kind!r} of "
      f"version {VERSION}"
    )
  check_json(metadata, SCHEMAS[kind], os.fspath(path))
  for name in SUMS:
    if name not in metadata:
      continue
    total = sum(entry.get(name, 0) for entry in metadata["shards"])
    if metadata[name] != total:
      raise ValueError(
        f"{path}: {name}={metadata[name]} must be the sum of its shards', "
        f"{total}"
      )
  return metadata


def damage(folder: pathlib.Path) -> list[str]:
  """Compares the shards of a set of any kind with their checksums.

  Args:
    folder: folder of the set.

  Returns:
    A line for each shard that is missing or not as it was written. Sets of
    older versions have no checksums, so only their lengths are compared.

  Raises:
    ValueError: metadata.json is damaged.
  """
  path = folder / METADATA
  kind = read_json(path, Head, _MAX_METADATA)["format"]
  if kind not in SCHEMAS:
    raise ValueError(
      f"{path}: 'format' is {kind!r}, must be one of {tuple(SCHEMAS)}"
    )
  lines = []
  for entry in read_metadata(folder, kind)["shards"]:
    file = folder / entry["file"]
    if not file.is_file():
      lines.append(f"{file}: no such file")
      continue
    summed, length = checksum(file)
    if length != entry["bytes"] or entry.get("xxh3", summed) != summed:
      lines.append(f"{file}: its content is not what was written")
  return lines


class _OpenShards:
  """Least-recently-used cache of this process's open shards.

  A set owns its readers, so they are freed with it; the cache holds a weak
  reference to the set. An evicted reader is dropped, not closed: it closes its
  file when the last thread that reads from it is done.
  """

  def __init__(self):
    self._lock = threading.Lock()
    # (id of the set, number of the shard) -> the set, the last used at the end.
    self._used: collections.OrderedDict[
      tuple[int, int], weakref.ref[Shards]
    ] = collections.OrderedDict()

  def reader(self, owner: "Shards", shard: int) -> Any:
    """The reader of one shard of a set; opens it if it is closed.

    Raises:
      RuntimeError: the shard cannot be opened.
    """
    key = id(owner), shard
    with self._lock:
      reader = owner.readers.get(shard)
      if reader is not None:
        self._used.move_to_end(key)
        return reader
    # Opening is slow, so it happens outside of the lock.
    reader = _open_reader(owner.path(shard))
    with self._lock:
      reader = owner.readers.setdefault(shard, reader)
      self._used[key] = weakref.ref(owner)
      self._used.move_to_end(key)
      while len(self._used) > _max_open():
        (_, oldest), reference = self._used.popitem(last=False)
        if (other := reference()) is not None:
          other.readers.pop(oldest, None)
    return reader


_OPEN = _OpenShards()


class Shards:
  """Random access to the records of a set; picklable and thread-safe.

  Attributes:
    metadata: content of metadata.json.
    readers: open shards by number, managed by `_OpenShards`.
  """

  def __init__(self, folder: str | os.PathLike, kind: str):
    """Opens a set.

    Args:
      folder: folder of the set.
      kind: expected kind: "images", "latents" or "tokens".

    Raises:
      FileNotFoundError: metadata.json or a shard is missing.
      ValueError: metadata.json is of another kind, or a shard is truncated.
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
    """Returns the header and the payload of record `index`.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; the message names it.
    """
    record = self.record(index)
    try:
      return unpack(record)
    except ValueError as error:
      where = self.locate(index)
      raise ValueError(f"{where}: damaged record: {error}") from error

  def identity(self) -> Identity:
    """Identifies the shards and their order."""
    return of_shards(self._folder, self._shards)

  def record(self, index: int) -> bytes:
    """Returns the bytes of record `index`.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; the message names it.
    """
    shard, position = self._find(index)
    try:
      return _OPEN.reader(self, shard).read([position])[0]
    except (RuntimeError, ValueError, IndexError) as error:
      where = self.locate(index)
      raise ValueError(f"{where}: damaged record: {error}") from error

  def locate(self, index: int) -> str:
    """Names a record for messages: "PATH/00000-of-00002.array_record[7]"."""
    shard, position = self._find(index)
    return f"{self.path(shard)}[{position}]"

  def path(self, shard: int) -> pathlib.Path:
    """Path of shard number `shard`."""
    return self._folder / self._shards[shard]["file"]

  def _find(self, index: int) -> tuple[int, int]:
    """The shard that holds a record, and the record's position in it."""
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
  if not reader.ok():
    reader.close()  # a closed reader raises when it is used
  return reader


def _max_open() -> int:
  files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, 1)


def _some(names: list[str]) -> str:
  more = f" and {len(names) - 5} more" if len(names) > 5 else ""
  return ", ".join(names[:5]) + more
