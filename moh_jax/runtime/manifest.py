"""Checksums of a checkpoint's files; importable without JAX.

The file `manifest.txt` of a step folder is written last, before the folder gets
its name. Its first line holds the checksum of the others, each of which states
the checksum, the length and the path of a file of the step. The checksum is
XXH3 of 128 bits, so that reading a file takes longer than summing it up.
"""

import concurrent.futures
import dataclasses
import os
import stat
from collections.abc import Collection, Iterator

import xxhash
from etils import epath

from moh_jax.files import checksum, write_whole
from moh_jax.json_files import parse_json

NAME = "manifest.txt"
# What the item `config` states where a manifest belongs to a step, so that its
# loss is found. Steps of older versions do not state it.
FLAG = "manifest"
_HEADER = "moh_jax manifest 1, XXH3-128 of the following lines: "
_MOST_BYTES = 64 << 20  # of a manifest
_THREADS = 4


@dataclasses.dataclass(frozen=True)
class Damage:
  """A file of a checkpoint that is not as it was written.

  Attributes:
    file: path of the file within the step folder.
    what: how it differs.
  """

  file: str
  what: str

  @property
  def item(self) -> str:
    """The item that the file belongs to, "" for files of the step itself."""
    return self.file.partition("/")[0] if "/" in self.file else ""

  def __str__(self) -> str:
    inside = self.file.removeprefix(f"{self.item}/")
    where = f"item {self.item}, " if self.item else ""
    return f"{where}file {inside}: {self.what}"


@dataclasses.dataclass(frozen=True)
class Entry:
  """What a manifest states of a file: its checksum and its length in bytes."""

  checksum: str
  length: int


def write(folder: epath.Path) -> None:
  """Writes the manifest of all files below a folder."""
  paths = sorted(_files(folder))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    entries = pool.map(lambda path: Entry(*checksum(folder / path)), paths)
    lines = "".join(
      f"{entry.checksum} {entry.length} {path}\n"
      for path, entry in zip(paths, entries)
    )
  write_whole(folder / NAME, f"{_header(lines)}{lines}".encode())


def read(folder: epath.Path) -> dict[str, Entry] | None:
  """Reads the manifest of a step folder.

  Returns:
    The entries by path, or None for a checkpoint of a version that wrote none.

  Raises:
    ValueError: the manifest is damaged, or missing where there was one.
    OSError: it cannot be read.
  """
  path = folder / NAME
  if not path.exists():
    if _expects_manifest(folder):
      raise ValueError("missing")
    return None
  length = _length(path)
  if length > _MOST_BYTES:
    raise ValueError(f"{length} bytes, at most {_MOST_BYTES} are allowed")
  try:
    header, newline, lines = path.read_bytes().decode().partition("\n")
  except UnicodeDecodeError:
    raise ValueError("damaged") from None
  if header + newline != _header(lines):
    raise ValueError("damaged, or of a newer version")
  entries = {}
  for line in lines.splitlines():
    checksum, size, name = line.split(" ", 2)
    if ".." in name.split("/") or name.startswith("/"):
      raise ValueError(f"names a file outside of the checkpoint: {name!r}")
    entries[name] = Entry(checksum, int(size))
  return entries


def find_damage(
  folder: epath.Path, items: Collection[str] | None = None
) -> list[Damage] | None:
  """Compares the files of a step folder with its manifest.

  Args:
    folder: step folder.
    items: names of the items to read; None reads all. Files of the step itself
      are always read.

  Returns:
    The damaged files, or None for a checkpoint without checksums.
  """
  try:
    entries = read(folder)
  except (ValueError, OSError) as error:
    return [Damage(NAME, str(error))]
  if entries is None:
    return None
  wanted = [
    (path, entry)
    for path, entry in entries.items()
    if items is None or "/" not in path or path.partition("/")[0] in items
  ]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(lambda pair: _compare(folder, *pair), wanted)
    return [damage for damage in found if damage]


def _compare(folder: epath.Path, name: str, entry: Entry) -> Damage | None:
  path = folder / name
  try:
    length = _length(path)
    if length != entry.length:
      what = f"{length} bytes, {entry.length} were written"
    elif Entry(*checksum(path)) != entry:
      what = "its content is not what was written"
    else:
      return None
  except FileNotFoundError:
    what = "missing"
  except (OSError, ValueError) as error:
    what = f"cannot be read: {error}"
  return Damage(name, what)


def _header(lines: str) -> str:
  return f"{_HEADER}{xxhash.xxh3_128_hexdigest(lines.encode())}\n"


def _length(path: epath.Path) -> int:
  """Bytes of a file.

  Raises:
    ValueError: it is no regular file: opening a pipe would wait for ever.
  """
  if "://" in os.fspath(path):
    return path.stat().length
  status = os.stat(path)
  if not stat.S_ISREG(status.st_mode):
    raise ValueError("not a regular file")
  return status.st_size


def _files(folder: epath.Path, below: str = "") -> Iterator[str]:
  """Paths of the files below a folder, but for its manifest."""
  for path in (folder / below).iterdir():
    name = f"{below}{path.name}"
    if path.is_dir():
      yield from _files(folder, f"{name}/")
    elif name != NAME:
      yield name


def _expects_manifest(folder: epath.Path) -> bool:
  """Whether the item `config` says that the step was written with one."""
  try:
    content = (folder / "config" / "metadata").read_bytes()
    return bool(parse_json(content).get(FLAG))
  except (OSError, ValueError):
    return False
