"""Writing sets of shards so that a killed process loses one shard at most.

A shard grows in FOLDER/unfinished/ and is renamed into FOLDER when it is whole.
metadata.json comes last; until then FOLDER/unfinished/ also remembers the
settings, and of each finished shard what metadata.json will say of it.
"""

import contextlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from array_record.python import array_record_module

from moh_jax.data import shards
from moh_jax.files import replacing

# Any record by itself, and payloads that are compressed already or are noise.
_OPTIONS = "group_size:1,uncompressed"
_UNFINISHED = "unfinished"
_SETTINGS = "settings.json"


class OpenShard:
  """A shard that is being written.

  Attributes:
    examples: records so far.
    skipped: items left out, and why.
    notes: further entries of what metadata.json says of the shard.
  """

  def __init__(self, path: pathlib.Path):
    self._writer = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)
    self.examples = 0
    self.skipped: dict[str, str] = {}
    self.notes: dict[str, Any] = {}

  def add(self, header: dict[str, Any], payload: bytes) -> None:
    """Appends a record of a header and a payload."""
    self.add_record(shards.pack(header, payload))

  def add_record(self, record: bytes) -> None:
    """Appends a record as it is."""
    with _disk_errors():
      self._writer.write(record)
    self.examples += 1

  def skip(self, name: str, reason: str) -> None:
    """Notes an item that is left out."""
    self.skipped[name] = reason

  def close(self) -> None:
    """Writes what is buffered."""
    self._writer.close()


class ShardSetWriter:
  """Writes items 0 to `items` - 1 as shards of `shard_size` of them."""

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
    """Starts a set, or continues one.

    Args:
      folder: of the set; created.
      kind: "images", "latents" or "tokens".
      items: how many there are.
      shard_size: items of a shard.
      settings: what the records depend on; a set is continued only with the
        same. JSON values.
      notes: further entries of metadata.json.

    Raises:
      ValueError: the folder holds a set of other settings (they are named), or
        shards that are not ours.
    """
    if shard_size < 1:
      raise ValueError(f"shard_size={shard_size} must be at least 1")
    self._folder = pathlib.Path(folder)
    self._unfinished = self._folder / _UNFINISHED
    self._kind, self._items, self._size = kind, items, shard_size
    settings = {**settings, "items": items, "shard_size": shard_size}
    self._settings = json.loads(json.dumps(settings))  # tuples as stored: lists
    self._notes = notes
    self._refuse_others()
    self._unfinished.mkdir(parents=True, exist_ok=True)
    _write_json(self._unfinished / _SETTINGS, self._settings)

  @property
  def num_shards(self) -> int:
    """Shards of the whole set."""
    return -(-self._items // self._size)

  def items(self, shard: int) -> range:
    """The items of a shard."""
    start = shard * self._size
    return range(start, min(start + self._size, self._items))

  def todo(self) -> list[int]:
    """The shards that are not there yet."""
    done = self._finished()
    return [s for s in range(self.num_shards) if self._name(s) not in done]

  @contextlib.contextmanager
  def open(self, shard: int) -> Iterator[OpenShard]:
    """Writes one shard, which appears when the context ends without an error.

    Raises:
      OSError: the disk is full, or another problem of writing.
    """
    name = self._name(shard)
    # A name of its own: another run of the same command does no harm.
    growing = self._unfinished / f"{name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
      with _disk_errors():
        target = OpenShard(growing)
      try:
        yield target
      except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error counts
          target.close()
        raise
      with _disk_errors():
        target.close()
        with growing.open("r+b") as file:
          os.fsync(file.fileno())
        entry = {
          "file": name,
          "examples": target.examples,
          "bytes": growing.stat().st_size,
          **target.notes,
          "skipped": target.skipped,
        }
        # First what is known of it: without that it would be written again.
        _write_json(self._unfinished / f"{name}.json", entry)
        growing.replace(self._folder / name)
    finally:
      growing.unlink(missing_ok=True)

  def entries(self) -> list[dict[str, Any]]:
    """What metadata.json will say of each shard.

    Raises:
      ValueError: a shard is missing.
    """
    done = self._finished()
    names = [self._name(shard) for shard in range(self.num_shards)]
    if missing := [name for name in names if name not in done]:
      raise ValueError(f"{self._folder} lacks the shards {missing[:5]}")
    return [done[name] for name in names]

  def finish(self, **notes: Any) -> dict[str, Any]:
    """Writes skipped.txt and metadata.json.

    Args:
      **notes: further entries of metadata.json.

    Returns:
      What metadata.json says.

    Raises:
      ValueError: a shard is missing, or no item could be read.
    """
    entries = self.entries()
    examples = sum(entry["examples"] for entry in entries)
    skipped = [item for entry in entries for item in entry["skipped"].items()]
    if not examples:
      raise ValueError(
        f"{self._folder}: none of the {self._items} {self._kind} could be "
        f"read, for instance {': '.join(skipped[0])}"
      )
    metadata = {
      "format": self._kind,
      "version": shards.VERSION,
      **self._settings,
      **self._notes,
      **notes,
      "examples": examples,
      "skipped": len(skipped),
      "shards": entries,
    }
    listing = self._folder / "skipped.txt"
    listing.unlink(missing_ok=True)
    if skipped:
      _write(listing, "".join(f"{name}: {why}\n" for name, why in skipped))
    _write_json(self._folder / shards.METADATA, metadata)
    shutil.rmtree(self._unfinished, ignore_errors=True)
    return metadata

  def discard(self) -> None:
    """Removes what is there of an unfinished set."""
    if (self._folder / shards.METADATA).is_file():
      return
    for shard in range(self.num_shards):
      (self._folder / self._name(shard)).unlink(missing_ok=True)
    shutil.rmtree(self._unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):  # other files are there
      self._folder.rmdir()

  def _name(self, shard: int) -> str:
    return f"{shard:05d}-of-{self.num_shards:05d}.array_record"

  def _finished(self) -> dict[str, dict[str, Any]]:
    """What is known of the shards that stand whole in the folder, by name."""
    # In this order, as another process may finish the set meanwhile: first it
    # writes metadata.json, then what is unfinished disappears.
    newer = []
    for path in sorted(self._unfinished.glob("*.array_record.json")):
      with contextlib.suppress(FileNotFoundError):
        newer.append(json.loads(path.read_text()))
    entries = newer
    if (self._folder / shards.METADATA).is_file():
      stored = shards.read_metadata(self._folder, self._kind)
      entries = [*stored["shards"], *newer]
    sizes = {
      path.name: path.stat().st_size
      for path in self._folder.glob("*.array_record")
    }
    return {
      entry["file"]: entry
      for entry in entries
      if sizes.get(entry["file"]) == entry["bytes"]
    }

  def _refuse_others(self):
    if (self._folder / shards.METADATA).is_file():
      stored = shards.read_metadata(self._folder, self._kind)
    elif (self._unfinished / _SETTINGS).is_file():
      stored = json.loads((self._unfinished / _SETTINGS).read_text())
    elif any(self._folder.glob("*.array_record")):
      raise ValueError(
        f"{self._folder} holds shards without {shards.METADATA}; choose "
        "another directory"
      )
    else:
      return
    differing = [
      f"{name}: {value!r} here, {stored.get(name)!r} there"
      for name, value in self._settings.items()
      if value != stored.get(name)
    ]
    if differing:
      raise ValueError(
        f"{self._folder} holds {self._kind} of other settings; "
        f"{'; '.join(differing)}. Choose another directory or the same settings"
      )


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
  """Says what stands when the disk is full."""
  try:
    yield
  except (RuntimeError, OSError) as error:  # array_record raises the former
    raise OSError(
      f"a shard was not written ({error}); the finished ones are whole: make "
      "room and run the same command again"
    ) from error


def _write_json(path: pathlib.Path, value: Any):
  _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: pathlib.Path, text: str):
  with replacing(path) as temporary:
    temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
