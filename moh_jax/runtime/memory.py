"""How much memory there is, to refuse what cannot fit before work begins."""

import functools
import os
import pathlib

_GROUP_LIMITS = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@functools.cache
def total() -> int:
  """Bytes of memory that this machine, or the container, may use."""
  limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for name in _GROUP_LIMITS:
    try:
      limits.append(int(pathlib.Path(name).read_text()))
    except (OSError, ValueError):  # no such group, or "max"
      continue
  return min(limits)


def check(needed: int, what: str, have: int | None = None) -> None:
  """Refuses what is larger than all memory.

  Args:
    needed: bytes that are needed at least.
    what: names what needs them and its sizes, for the message.
    have: bytes of memory; None is that of the machine.

  Raises:
    ValueError: they are more than there are.
  """
  have = total() if have is None else have
  if needed > have:
    raise ValueError(
      f"{what}: at least {_gib(needed)} of memory, there are {_gib(have)}"
    )


def _gib(count: int) -> str:
  return f"{count / 2**30:,.1f} GiB"
