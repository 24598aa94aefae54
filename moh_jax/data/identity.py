"""What identifies the data of a run, so that a change is noticed.

An identity is a dict of integers and short strings. Two streams with the same
identity, config and seed have the same examples in the same order.
"""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

Identity = dict[str, int | str]
_EDGE = 4096  # bytes at both ends of a file that its fingerprint reads


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
    with open(pathlib.Path(folder) / entry["file"], "rb") as stream:
      state.update(stream.read(_EDGE))
      stream.seek(max(0, entry["bytes"] - _EDGE))
      state.update(stream.read(_EDGE))
  return {
    "examples": sum(entry["examples"] for entry in entries),
    "shards": len(entries),
    "bytes": sum(entry["bytes"] for entry in entries),
    "fingerprint": state.hexdigest(),
  }


def differences(
  ours: Mapping[str, Identity], stored: Mapping[str, Identity]
) -> list[str]:
  """Describes how the data of two runs differ, by the name of the source."""
  lines = [f"data {name!r} is new" for name in _without(ours, stored)]
  lines += [f"data {name!r} is gone" for name in _without(stored, ours)]
  for name in ours.keys() & stored.keys():
    here, there = ours[name], stored[name]
    differing = [
      f"{fact} {here.get(fact)!r} here, {there.get(fact)!r} there"
      for fact in sorted(here.keys() | there.keys())
      if here.get(fact) != there.get(fact)
    ]
    if differing:
      lines.append(f"data {name!r}: {', '.join(differing)}")
  return sorted(lines)


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
  return sorted(set(names) - set(others))
