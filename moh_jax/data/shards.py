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
import functools
import itertools
import json
import os
import pathlib
import resource
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from array_record.python import array_record_module

from moh_jax.config.registry import MissingSplitError
from moh_jax.data.identity import Identity, of_shards, read_ends
from moh_jax.runtime.files import checksum, inside
from moh_jax.runtime.json_files import (
  Count,
  FileName,
  Sha256,
  Size,
  Text,
  check_json,
  json_checksum,
  parse_json,
  read_json,
)

METADATA = "metadata.json"
VERSION = 1
# Small buffers, since records are read in random order.
_READER_OPTIONS = "readahead_buffer_size:0"
_BUFFER_BYTES = 32 << 10
_MAX_HEADER = 1 << 16
_MAX_METADATA = 1 << 30  # a million shards have 200 MB
_FILES, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
_MOST_OPEN = None if _FILES == resource.RLIM_INFINITY else max(_FILES // 2, 1)

_Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Entry(msgspec.Struct, kw_only=True):
  """What metadata.json says of a shard."""

  file: FileName
  examples: Count
  bytes: Count
  xxh3: str  # of the whole file
  ends_xxh3: str  # of its two ends
  skipped: dict[str, Count]  # counts by reason


class FileEntry(msgspec.Struct):
  """What metadata.json says of a file beside the shards."""

  file: str
  bytes: Count
  xxh3: str


class TokenEntry(Entry):
  """What metadata.json says of a shard of tokens."""

  documents: Count
  tokens: Count
  text_bytes: Count


class _Set(msgspec.Struct, kw_only=True):
  examples: Count
  shards: list[Entry]
  skipped: Count = 0
  files: list[FileEntry]
  checksum: str


class Images(_Set):
  """metadata.json of encoded images."""

  class_names: list[Text]


class Latents(Images, kw_only=True):
  """metadata.json of latents."""

  latent_shape: Annotated[list[Size], msgspec.Meta(min_length=3, max_length=3)]
  latent_scale: _Scale
  latent_shift: float = 0.0
  latent_mean: list[float] = []
  latent_std: list[_Scale] = []
  encoder_sha256: Sha256 = ""
  image_size: int | list[int]


class TokenizerEntry(msgspec.Struct, kw_only=True):
  """The tokenizer that made a set of tokens."""

  kind: Literal["tokenizer_json", "sentencepiece", "bytes"]
  sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
  # Empty for bytes, which have none.
  file: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00]*\Z")]


class Tokens(_Set):
  """metadata.json of tokens."""

  shards: list[TokenEntry]
  tokenizer: TokenizerEntry
  vocab_size: Size
  documents: Count
  tokens: Count
  text_bytes: Count
  bos_id: Count | None = None
  eos_id: Count | None = None
  notes: dict = {}


SCHEMAS = {"images": Images, "latents": Latents, "tokens": Tokens}
_MAKERS = {  # kinds of `prepare`
  "images": "pack-images",
  "latents": "encode-latents",
  "tokens": "tokenize",
}


class Header(msgspec.Struct, kw_only=True):
  """The line of JSON at the start of a record of an image or a latent."""

  label: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
  name: str = ""


class Head(msgspec.Struct, kw_only=True):
  """What tells the kinds of sets apart."""

  format: str
  version: int


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


def read_metadata(
  folder: str | os.PathLike, kind: str | None = None
) -> dict[str, Any]:
  """Reads and checks the metadata.json of a set.

  Args:
    folder: folder of the set.
    kind: expected kind: "images", "latents" or "tokens"; None is any.

  Raises:
    MissingSplitError: there is no such folder.
    FileNotFoundError: there is no metadata.json.
    ValueError: it is damaged, or states another kind or version.
  """
  path = pathlib.Path(folder) / METADATA
  if not path.parent.is_dir():
    raise MissingSplitError(
      f"{path.parent}: no such directory; `python -m moh_jax prepare "
      f"{_MAKERS.get(kind, '...')}` makes it"
    )
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no such file; it is written last, so either the set of {kind} "
      "is unfinished (run the command that writes it again) or it is elsewhere"
    )
  metadata = read_json(path, Head, _MAX_METADATA)
  found, version = metadata["format"], metadata["version"]
  kinds = (kind,) if kind else tuple(SCHEMAS)
  if found not in kinds or version != VERSION:
    raise ValueError(
      f"{path}: holds {found!r} of version {version}, expected "
      f"{' or '.join(map(repr, kinds))} of version {VERSION}"
    )
  check_json(metadata, SCHEMAS[found], os.fspath(path))
  if metadata["checksum"] != json_checksum(metadata):
    raise ValueError(f"{path}: its content is not what was written")
  return metadata


def damage(folder: pathlib.Path) -> list[str]:
  """Compares the files of a set of any kind with their checksums.

  Args:
    folder: folder of the set.

  Returns:
    A line for each file that is missing or not as it was written.

  Raises:
    ValueError: metadata.json is damaged.
  """
  metadata = read_metadata(folder)
  return _differing(folder, metadata["shards"] + metadata["files"])


def _differing(
  folder: pathlib.Path, entries: Iterable[dict[str, Any]]
) -> list[str]:
  lines = []
  for entry in entries:
    file = inside(folder, entry["file"], METADATA)
    found = checksum(file) if file.is_file() else ("", -1)
    if found != (entry["xxh3"], entry["bytes"]):
      what = "its content is not what was written"
      lines.append(f"{file}: {what if found[0] else 'no such file'}")
  return lines


def checksum_of_ends(file: str | os.PathLike) -> str:
  """XXH3 of the first and last bytes of a shard, which tell it from others."""
  return xxhash.xxh3_128_hexdigest(read_ends(file, os.path.getsize(file)))


class Shards:
  """Random access to the records of a set; picklable and thread-safe.

  Attributes:
    metadata: content of metadata.json.
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
    self._written = self._check_files()
    counts = (shard["examples"] for shard in self._shards)
    self._ends = list(itertools.accumulate(counts))

  def __len__(self) -> int:
    return self.metadata["examples"]

  def __getitem__(self, index: int) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the payload of record `index`.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; the message names it.
    """
    return self.record(index, unpack)

  def identity(self) -> Identity:
    """Identifies the shards and their order."""
    return of_shards(self._folder, self._shards)

  def record(self, index: int, parse: Callable[[bytes], Any] = bytes) -> Any:
    """Returns the bytes of record `index`, or what `parse` makes of them.

    Raises:
      IndexError: the set has no such record.
      ValueError: the record is damaged; the message names it.
    """
    shard, position = self._find(index)
    try:
      ends = self._shards[shard]["ends_xxh3"]
      reader = _reader(str(self.path(shard)), self._written[shard], ends)
      return parse(reader.read([position])[0])
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

  def _check_files(self) -> list[int]:
    """Times of the last changes of the shards, which are of the right sizes."""
    paths = list(map(self.path, range(len(self._shards))))
    if missing := [path.name for path in paths if not path.is_file()]:
      raise FileNotFoundError(
        f"{self._folder} lacks {len(missing)} of its {len(paths)} shards: "
        f"{', '.join(missing[:5])}"
      )
    # The files beside them are small, so that their content is compared too.
    if lines := _differing(self._folder, self.metadata["files"]):
      raise ValueError(
        f"{lines[0]}; the command that made the set writes it again"
      )
    found = [path.stat() for path in paths]
    for shard, stat in zip(self._shards, found):
      if stat.st_size != shard["bytes"]:
        raise ValueError(
          f"{self._folder}: a shard is truncated or not of this set: "
          f"{shard['file']} ({stat.st_size} bytes)"
        )
    return [stat.st_mtime_ns for stat in found]


@functools.lru_cache(_MOST_OPEN)
def _reader(path: str, written: int, ends: str) -> Any:
  """Opens a shard, or returns it from those that were used last.

  Args:
    path: of the file.
    written: time of its last change, since another file may take its place.
    ends: checksum of its two ends.

  Raises:
    RuntimeError: it cannot be opened.
    ValueError: it is another shard.
  """
  if checksum_of_ends(path) != ends:
    raise ValueError("the shard is not as it was written")
  reader = array_record_module.ArrayRecordReader(
    path, options=_READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
  )
  if not reader.ok():
    reader.close()
    reader.read([0])  # raises, with the reason
  return reader
