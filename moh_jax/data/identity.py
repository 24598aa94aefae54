"""What identifies the data of a run, so that a change is noticed.

An identity is a dict of integers and short strings. Two streams with the same
identity, config and seed have the same examples in the same order. Files are
known by names and sizes: one of equal name and length counts as the same.
"""

import concurrent.futures
import os
from collections.abc import Mapping, Sequence

import xxhash

from moh_jax.runtime.alive import alive

Identity = dict[str, int | str]
_THREADS, _FILES_AT_ONCE = 16, 4096


@alive("reading the sizes of the images")
def of_files(
  root: str | os.PathLike, names: Sequence[str], facts: bytes
) -> str:
  """Identifies files by names and sizes, in order, and further facts."""

  def sizes(start: int) -> list[int]:
    return [
      os.stat(path).st_size if os.path.exists(path) else -1  # a broken link
      for name in names[start : start + _FILES_AT_ONCE]
      for path in (os.path.join(root, name),)
    ]

  listed = "\n".join(names).encode(errors="surrogateescape")
  state = xxhash.xxh3_128(listed + b"\0" + facts)
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    for part in pool.map(sizes, range(0, len(names), _FILES_AT_ONCE)):
      state.update(str(part).encode())
  return state.hexdigest()


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
    ]
    if differing:
      lines.append(f"data {name!r}: {', '.join(differing)}")
  return sorted(lines)
