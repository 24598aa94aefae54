"""What identifies the data of a run, so that a change is noticed.

An identity is a dict of integers and short strings. Two streams with the same
identity, config and seed have the same examples in the same order.
"""

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from moh_jax.runtime.alive import alive

Identity = dict[str, int | str]
_EDGE = 4096  # bytes at both ends of a file that its fingerprint reads
# Of a set of millions of small files not all are read.
_MOST_READ = 1 << 16
_THREADS, _FILES_AT_ONCE = 16, 4096
# Facts that checkpoints of older versions, or data in buckets, do not have.
_OPTIONAL = {"content"}


def of_shards(
  folder: str | os.PathLike, entries: Sequence[Mapping[str, Any]]
) -> Identity:
  """Identifies a set by its shards, in order: name, sizes, both ends.

  Args:
    folder: folder of the set.
    entries: of its shards, from metadata.json.
  """
  state = xxhash.xxh3_128()
  for entry in entries:
    line = f"{entry['file']} {entry['bytes']} {entry['examples']}\n"
    state.update(line.encode(errors="surrogateescape"))
    state.update(
      read_ends(pathlib.Path(folder) / entry["file"], entry["bytes"])
    )
  return {
    "examples": sum(entry["examples"] for entry in entries),
    "shards": len(entries),
    "bytes": sum(entry["bytes"] for entry in entries),
    "fingerprint": state.hexdigest(),
  }


@alive("reading the sizes and ends of the images")
def of_files(paths: Sequence[str]) -> str:
  """Identifies the content of local files, in order: sizes, both ends.

  The ends are those of at most 65,536 files, at equal distances. Files that
  cannot be read are left out.
  """
  step = -(-len(paths) // _MOST_READ)

  def facts(start: int) -> bytes:
    state = xxhash.xxh3_128()
    for number, path in enumerate(paths[start : start + _FILES_AT_ONCE], start):
      with contextlib.suppress(OSError):
        size = os.stat(path).st_size
        state.update(b"%d %d\n" % (number, size))
        if number % step == 0 and os.path.isfile(path):
          state.update(read_ends(path, size))
    return state.digest()

  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    parts = pool.map(facts, range(0, len(paths), _FILES_AT_ONCE))
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def read_ends(path: str | os.PathLike, size: int) -> bytes:
  """The first and the last bytes of a file."""
  with open(path, "rb") as stream:
    first = stream.read(_EDGE)
    stream.seek(max(0, size - _EDGE))
    return first + stream.read(_EDGE)


def differences(
  ours: Mapping[str, Identity], stored: Mapping[str, Identity]
) -> list[str]:
  """Describes how the data of two runs differ, by the name of the source."""
  lines = [f"data {name!r} is new" for name in ours.keys() - stored.keys()]
  lines += [f"data {name!r} is gone" for name in stored.keys() - ours.keys()]
  for name in ours.keys() & stored.keys():
    here, there = ours[name], stored[name]
    differing = [
      f"{fact} {here.get(fact)!r} here, {there.get(fact)!r} there"
      for fact in sorted(here.keys() | there.keys())
      if here.get(fact) != there.get(fact)
      and not (fact in _OPTIONAL and None in (here.get(fact), there.get(fact)))
    ]
    if differing:
      lines.append(f"data {name!r}: {', '.join(differing)}")
  return sorted(lines)
