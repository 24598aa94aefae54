"""Sets of examples in array_record shards: their format, and reading them.

A set is a folder of NNNNN-of-NNNNN.array_record and metadata.json, which is
written last and says what the set holds and how large each shard is. A record
is one line of JSON, then bytes (of the kind "tokens": bytes alone). The folder
is local or mounted: array_record reads no buckets.
"""

import json
import os
import pathlib
from typing import Any

import grain

METADATA = "metadata.json"
VERSION = 1


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


class Shards:
  """Random access to the records of a set; picklable.

  Attributes:
    metadata: what the set says of itself.
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
    # With the numbers of records known, no shard is opened before it is read.
    self._records = grain.sources.ArrayRecordDataSource(
      [
        f"{self._folder / shard['file']}[0:{shard['examples']}]"
        for shard in self._shards
      ]
    )

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
      ValueError: the record is damaged; it is named.
    """
    try:
      return self._records[index]
    except (RuntimeError, ValueError) as error:
      where = self.locate(index)
      raise ValueError(f"{where}: damaged record: {error}") from error

  def locate(self, index: int) -> str:
    """The shard and the position of a record in it, as text."""
    position = index
    for shard in self._shards:
      if position < shard["examples"]:
        return f"{self._folder / shard['file']}[{position}]"
      position -= shard["examples"]
    raise IndexError(f"index={index} of {len(self)} records")

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


def _some(names: list[str]) -> str:
  more = f" and {len(names) - 5} more" if len(names) > 5 else ""
  return ", ".join(names[:5]) + more
