"""Writes sets of shards so that a killed process loses one shard at most.

A shard is written in FOLDER/unfinished/ and renamed into FOLDER when it is
complete. metadata.json is written last; until then FOLDER/unfinished/ also
holds the settings of the set, and for each finished shard its future entry of
metadata.json. FOLDER/skipped/ has a list for each shard that lacks an item.
"""

import contextlib
import functools
import json
import os
import pathlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from array_record.python import array_record_module

from moh_jax.data import shards
from moh_jax.data.shards import Entry
from moh_jax.runtime.files import (
  checksum,
  disk_errors,
  remove_files,
  write_whole,
)
from moh_jax.runtime.json_files import (
  differences,
  json_checksum,
  plain,
  read_json,
)

# Records can be read one by one; payloads do not compress any further.
_OPTIONS = "group_size:1,uncompressed"
_UNFINISHED = "unfinished"
_SETTINGS = "settings.json"
_SKIPPED = "skipped"
# Names in "unfinished"; without the settings the shards would be nobody's.
_OURS = ("*.array_record.*", _SETTINGS)
_disk_errors = functools.partial(
  disk_errors, "a shard", "the finished ones are"
)


class OpenShard:
  """A shard that is being written.

  Attributes:
    examples: number of records so far.
    skipped: number of items that were left out, by reason.
    notes: further fields for the shard's entry in metadata.json.
  """

  def __init__(self, path: pathlib.Path, listing: pathlib.Path):
    self._writer = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)
    self._listing = listing.open(
      "w", encoding="utf-8", errors="surrogateescape"
    )
    self.examples = 0
    self.skipped: Counter[str] = Counter()
    self.notes: dict[str, Any] = {}

  def add(self, header: dict[str, Any], payload: bytes) -> None:
    """Appends a record that consists of a header and a payload."""
    self.add_record(shards.pack(header, payload))

  def add_record(self, record: bytes) -> None:
    """Appends a record of any bytes."""
    with _disk_errors():
      self._writer.write(record)
    self.examples += 1

  def skip(self, name: str, reason: str, detail: str = "") -> None:
    """Records that an item is left out, as a line of the shard's list.

    Args:
      name: of the item.
      reason: kind of the problem; items are counted by it.
      detail: what else the line says, with its punctuation.
    """
    line = " ".join(f"{name}: {reason}{detail}".splitlines())
    with _disk_errors():
      self._listing.write(line + "\n")
    self.skipped[reason] += 1

  def close(self) -> None:
    """Writes what is buffered and closes the files."""
    self._listing.close()
    self._writer.close()


class ShardSetWriter:
  """Writes a set of `items` items, `shard_size` of them in each shard.

  A typical use, which also continues an interrupted set:

    writer = ShardSetWriter(...)
    for shard in writer.todo():
      with writer.open(shard) as target:
        for item in writer.items(shard):
          target.add(header, payload)
    writer.finish()

  Attributes:
    num_shards: of the whole set.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    kind: str,
    *,
    items: int,
    shard_size: int,
    settings: dict[str, Any],
    notes: dict[str, Any],
  ):
    """Starts a set, or continues an interrupted one.

    Args:
      folder: folder of the set; created.
      kind: "images", "latents" or "tokens".
      items: number of items.
      shard_size: items per shard.
      settings: JSON values that the records depend on; a set is continued only
        with equal settings.
      notes: further fields of metadata.json.

    Raises:
      ValueError: the folder holds a set with other settings (they are named),
        or shards of unknown origin.
    """
    self._folder = pathlib.Path(folder)
    self._unfinished = self._folder / _UNFINISHED
    self._kind, self._items, self._size = kind, items, shard_size
    self.num_shards = -(-items // shard_size)
    settings = {**settings, "items": items, "shard_size": shard_size}
    self._settings = plain(settings)  # tuples as stored: lists
    self._notes = notes
    self._check_folder()
    self._unfinished.mkdir(parents=True, exist_ok=True)
    _write_json(self._unfinished / _SETTINGS, self._settings)

  def items(self, shard: int) -> range:
    """Numbers of the items that belong to a shard."""
    start = shard * self._size
    return range(start, min(start + self._size, self._items))

  def todo(self) -> list[int]:
    """Numbers of the shards that are still to be written."""
    done = self._finished()
    return [s for s in range(self.num_shards) if self._name(s) not in done]

  @contextlib.contextmanager
  def open(self, shard: int) -> Iterator[OpenShard]:
    """Context that writes one shard; it appears if the context ends normally.

    Raises:
      OSError: the shard cannot be written, for example because the disk is
        full.
    """
    name = self._name(shard)
    if not self._unfinished.is_dir():
      raise OSError(f"{self._folder}: another process has finished the set")
    # The unique name lets two runs of the same command write side by side.
    growing = self._unfinished / f"{name}.{uuid.uuid4().hex[:12]}.tmp"
    listing = growing.with_suffix(".txt")
    try:
      with _disk_errors():
        target = OpenShard(growing, listing)
      try:
        yield target
      except BaseException:
        with contextlib.suppress(RuntimeError):  # keep the first error
          target.close()
        raise
      with _disk_errors():
        target.close()
        with growing.open("r+b") as file:
          os.fsync(file.fileno())
        summed, length = checksum(growing)
        entry = {"file": name, "examples": target.examples, "bytes": length}
        ends = shards.checksum_of_ends(growing)
        entry |= {"xxh3": summed, "ends_xxh3": ends}
        entry |= {**target.notes, "skipped": target.skipped}
        if target.skipped:
          lists = self._folder / _SKIPPED
          lists.mkdir(exist_ok=True)
          listing.replace(lists / _list_name(name))
        # The entry first: a shard without one would be written again.
        _write_json(self._unfinished / f"{name}.json", entry)
        growing.replace(self._folder / name)
    finally:
      growing.unlink(missing_ok=True)
      listing.unlink(missing_ok=True)

  def entries(self) -> list[dict[str, Any]]:
    """The entries that metadata.json will have for the shards, in order.

    Raises:
      ValueError: a shard is missing.
    """
    done = self._finished()
    names = [self._name(shard) for shard in range(self.num_shards)]
    if missing := [name for name in names if name not in done]:
      raise ValueError(f"{self._folder} lacks the shards {missing[:5]}")
    return [done[name] for name in names]

  def finish(self, files: Iterable[str] = (), **notes: Any) -> dict[str, Any]:
    """Writes metadata.json.

    Args:
      files: names of the set's other files.
      **notes: further fields of metadata.json.

    Returns:
      The content of metadata.json.

    Raises:
      ValueError: a shard is missing, or no item could be read.
    """
    entries = self.entries()
    examples = sum(entry["examples"] for entry in entries)
    if not examples:
      raise ValueError(
        f"{self._folder}: none of the {self._items} {self._kind} could be "
        f"read; {describe_skipped(entries)}, see {self._folder}/{_SKIPPED}"
      )
    metadata = {"format": self._kind, "version": shards.VERSION}
    metadata |= {**self._settings, **self._notes, **notes}
    skipped = _count_skipped(entries).total()
    metadata |= {"examples": examples, "skipped": skipped, "shards": entries}
    sums = {name: checksum(self._folder / name) for name in sorted(files)}
    metadata["files"] = [
      {"file": name, "bytes": length, "xxh3": summed}
      for name, (summed, length) in sums.items()
    ]
    metadata = plain(metadata)
    metadata["checksum"] = json_checksum(metadata)
    _write_json(self._folder / shards.METADATA, metadata)
    remove_files(self._unfinished, *_OURS)
    return metadata

  def discard(self) -> None:
    """Removes an unfinished set; a finished one stays."""
    if (self._folder / shards.METADATA).is_file():
      return
    for shard in range(self.num_shards):
      (self._folder / self._name(shard)).unlink(missing_ok=True)
    remove_files(self._folder / _SKIPPED, _list_name("*-of-*"))
    remove_files(self._unfinished, *_OURS)
    with contextlib.suppress(OSError):  # the folder has other files
      self._folder.rmdir()

  def _name(self, shard: int) -> str:
    return f"{shard:05d}-of-{self.num_shards:05d}.array_record"

  def _finished(self) -> dict[str, dict[str, Any]]:
    """The entries of the complete shards in the folder, by file name."""
    # Read in this order, since another process may finish the set meanwhile: it
    # writes metadata.json first and then removes the folder "unfinished".
    entries = []
    for path in sorted(self._unfinished.glob("*.array_record.json")):
      with contextlib.suppress(FileNotFoundError):
        entries.append(read_json(path, Entry))
    if (self._folder / shards.METADATA).is_file():
      stored = shards.read_metadata(self._folder, self._kind)
      entries = [*stored["shards"], *entries]
    files = self._folder.glob("*.array_record")
    sizes = {path.name: path.stat().st_size for path in files}
    return {e["file"]: e for e in entries if sizes.get(e["file"]) == e["bytes"]}

  def _check_folder(self):
    if (self._folder / shards.METADATA).is_file():
      stored = shards.read_metadata(self._folder, self._kind)
    elif (self._unfinished / _SETTINGS).is_file():
      stored = read_json(self._unfinished / _SETTINGS)
    elif any(self._folder.glob("*.array_record")):
      raise ValueError(
        f"{self._folder} holds shards without {shards.METADATA}; choose "
        "another directory"
      )
    else:
      return
    theirs = {name: stored.get(name) for name in self._settings}
    if differing := differences(self._settings, theirs):
      raise ValueError(
        f"{self._folder} holds {self._kind} of other settings; {differing}. "
        "Choose another directory or the same settings"
      )


def describe_skipped(entries: Iterable[Mapping[str, Any]]) -> str:
  """What was left out of shards: "3 skipped (2 empty, 1 not JSON)", or "".

  Args:
    entries: of metadata.json.
  """
  counts = _count_skipped(entries)
  if not counts:
    return ""
  reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common())
  return f"{counts.total():,} skipped ({reasons})"


def _count_skipped(entries: Iterable[Mapping[str, Any]]) -> Counter[str]:
  return sum((Counter(e["skipped"]) for e in entries), Counter())


def _list_name(shard: str) -> str:
  return pathlib.PurePath(shard).with_suffix(".txt").name


def _write_json(path: pathlib.Path, value: Any):
  write_whole(path, f"{json.dumps(value, indent=2)}\n".encode())
