"""Sets of examples in array_record shards: writing, and random access.

A set is a folder of files NNNNN-of-NNNNN.array_record and a metadata.json,
which is written last. A record is a line of JSON and then bytes; sets of the
kind "tokens" have records of bytes alone. array_record compares checksums of
its own when a record is read, and reads no buckets.

A shard is renamed into the folder when it is whole, so a killed process loses
one at most. FOLDER/parts/ has what the next call needs to go on: the settings,
and the entry of each shard in metadata.json.
"""

import bisect
import contextlib
import functools
import json
import pathlib
import resource
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import xxhash
from array_record.python import array_record_module

from moh_jax.config.registry import MissingSplitError
from moh_jax.data.files import Identity, StrPath
from moh_jax.runtime import files as runtime_files
from moh_jax.runtime.files import read_json, write_whole

METADATA, SKIPPED = "metadata.json", "skipped.txt"
VERSION = 2
# Records are read one by one in random order; payloads compress no further.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0"
_BUFFER_BYTES = 32 << 10
# A process keeps open the shards that it used last: to open one takes 2 ms.
_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MOST_OPEN = 4096 if _LIMIT == resource.RLIM_INFINITY else _LIMIT // 2


class _Metadata(msgspec.Struct):
  """What every metadata.json has, beside the fields of its kind."""

  format: str
  version: int
  examples: int
  shards: list[dict[str, Any]]  # "file", "examples", "bytes", and the writer's


def read_metadata(folder: StrPath, kind: str) -> dict[str, Any]:
  """Reads the metadata.json of a set.

  Args:
    folder: folder of the set.
    kind: expected kind: "images", "latents" or "tokens".

  Raises:
    MissingSplitError: there is no such folder.
    FileNotFoundError: there is no metadata.json.
    ValueError: it is damaged, or states another kind or version.
  """
  path = pathlib.Path(folder) / METADATA
  if not path.parent.is_dir():
    raise MissingSplitError(f"{path.parent}: no such directory")
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no such file; it is written last, so prepare the set again"
    )
  metadata = read_json(path, _Metadata)
  found, expected = (metadata["format"], metadata["version"]), (kind, VERSION)
  if found != expected:
    raise ValueError(f"{path}: holds {found}, expected {expected}")
  return metadata


class Shards:
  """Random access to the records of a set; picklable and thread-safe.

  Attributes:
    metadata: content of metadata.json.
  """

  def __init__(self, folder: StrPath, kind: str):
    """Opens a set.

    Args:
      folder: folder of the set, local or mounted.
      kind: expected kind: "images", "latents" or "tokens".

    Raises:
      FileNotFoundError: there is no metadata.json.
      ValueError: it is of another kind, or a shard is missing or truncated.
    """
    self.metadata = read_metadata(folder, kind)
    self._paths, self._starts, start = [], [], 0
    for shard in self.metadata["shards"]:
      path = pathlib.Path(folder, shard["file"])
      if not path.is_file() or path.stat().st_size != shard["bytes"]:
        raise ValueError(f"{path}: missing, truncated or of another set")
      self._paths.append(str(path))
      self._starts.append(start)
      start += shard["examples"]

  def __len__(self) -> int:
    return self.metadata["examples"]

  def __getitem__(self, index: int) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the payload of record `index`."""
    header, _, payload = self.record(index).partition(b"\n")
    return json.loads(header), payload

  def record(self, index: int) -> bytes:
    """Returns the bytes of record `index`.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; the message names it.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"index={index} of {len(self)} records")
    shard = bisect.bisect_right(self._starts, index) - 1
    path, position = self._paths[shard], index - self._starts[shard]
    try:
      return _reader(path).read([position])[0]
    except (RuntimeError, IndexError) as error:
      raise ValueError(f"{path}[{position}]: damaged: {error}") from error

  def identity(self) -> Identity:
    """Identifies the shards, their order and the settings they depend on."""
    return {"examples": len(self), "fingerprint": self.metadata["fingerprint"]}


@functools.lru_cache(_MOST_OPEN)
def _reader(path: str) -> Any:
  return array_record_module.ArrayRecordReader(
    path, options=_READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
  )


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
  """Turns errors of writing, as on a full disk, into an OSError."""
  try:
    yield
  except (RuntimeError, OSError) as error:  # array_record raises RuntimeError
    raise OSError(
      f"a shard cannot be written: {error}; finished ones are whole: run again"
    ) from error


class OpenShard:
  """A shard that is being written.

  Attributes:
    examples: number of records so far.
    skipped: what was left out, a line each.
    counts: further numbers; metadata.json has them by shard, and their sums.
  """

  def __init__(self, path: pathlib.Path):
    self._writer = array_record_module.ArrayRecordWriter(
      str(path), _WRITER_OPTIONS
    )
    self.examples = 0
    self.skipped: list[str] = []
    self.counts: dict[str, int] = {}

  def add(self, header: dict[str, Any], payload: bytes) -> None:
    """Appends a record that consists of a header and a payload."""
    self.add_record(json.dumps(header).encode() + b"\n" + payload)

  def add_record(self, record: bytes) -> None:
    """Appends a record of any bytes."""
    with _disk_errors():
      self._writer.write(record)
    self.examples += 1

  def skip(self, what: str) -> None:
    """Records that an item is left out: its name, and why."""
    self.skipped.append(" ".join(what.split()))

  def close(self) -> None:
    """Writes what is buffered and closes the file."""
    with _disk_errors():
      self._writer.close()


class ShardWriter:
  """Writes a set shard by shard, also one that was interrupted.

  That is:

    writer = ShardWriter(...)
    for shard in writer.todo():
      with writer.open(shard) as target:
        target.add(header, payload)
    writer.finish()
  """

  def __init__(
    self,
    folder: StrPath,
    kind: str,
    num_shards: int,
    settings: dict[str, Any],
    shard: Callable[[pathlib.Path], Any] = OpenShard,
  ):
    """Starts a set, or continues an interrupted one.

    Args:
      folder: folder of the set; created.
      kind: "images", "latents" or "tokens".
      num_shards: of the whole set.
      settings: JSON values that the records depend on; a set is continued only
        with equal ones. They are part of metadata.json.
      shard: opens a shard at a path; picklable.

    Raises:
      ValueError: the folder holds shards of other settings, which are named.
    """
    self._folder = pathlib.Path(folder)
    self._kind, self._num_shards, self._shard = kind, num_shards, shard
    self._settings = {**settings, "num_shards": num_shards}
    self._parts = self._folder / "parts"
    self._parts.mkdir(parents=True, exist_ok=True)
    stated = self._parts / "settings.json"
    what = f"{self._folder} holds {kind}"
    runtime_files.same_settings(stated, self._settings, what)
    write_whole(stated, _json(self._settings))

  def todo(self) -> list[int]:
    """Numbers of the shards that are still to be written."""
    shards = range(self._num_shards)
    return [shard for shard in shards if not self._path(shard).is_file()]

  @contextlib.contextmanager
  def open(self, shard: int) -> Iterator[Any]:
    """Context that writes one shard; it appears if the context ends normally.

    Raises:
      OSError: the shard cannot be written, for example because the disk is
        full.
    """
    path = self._path(shard)
    with runtime_files.replacing(path) as growing:
      target = self._shard(growing)
      try:
        yield target
      finally:
        target.close()
      size = growing.stat().st_size
      entry = {"file": path.name, "examples": target.examples, "bytes": size}
      entry |= {**target.counts, "skipped": target.skipped}
      write_whole(self._entry(shard), _json(entry))

  def finish(self, **notes: Any) -> dict[str, Any]:
    """Writes metadata.json, and skipped.txt where something was left out.

    Args:
      **notes: further fields of metadata.json.

    Returns:
      The content of metadata.json.

    Raises:
      ValueError: the set is empty.
    """
    entries = [read_json(self._entry(s)) for s in range(self._num_shards)]
    skipped = [line for entry in entries for line in entry.pop("skipped")]
    if skipped:
      lines = "\n".join([*skipped, ""])
      content = lines.encode(errors="surrogateescape")
      write_whole(self._folder / SKIPPED, content)
    counts = [name for name in entries[0] if name not in ("file", "bytes")]
    sums = {name: sum(entry[name] for entry in entries) for name in counts}
    if not sums.get("documents", sums["examples"]):
      raise ValueError(f"{self._folder}: the input is too small to fill it")
    metadata = {"format": self._kind, "version": VERSION, **self._settings}
    metadata |= {**notes, **sums, "skipped": len(skipped)}
    # What tells sets apart: settings, and names and sizes of the shards.
    known = _json({"settings": self._settings, "shards": entries})
    metadata["fingerprint"] = xxhash.xxh3_128_hexdigest(known)
    metadata["shards"] = entries
    write_whole(self._folder / METADATA, _json(metadata))
    return metadata

  def _path(self, shard: int) -> pathlib.Path:
    name = f"{shard:05d}-of-{self._num_shards:05d}.array_record"
    return self._folder / name

  def _entry(self, shard: int) -> pathlib.Path:
    return self._parts / f"{shard:05d}.json"


def _json(value: Any) -> bytes:
  return f"{json.dumps(value, indent=2)}\n".encode()
