"""Range checks that name the field, its value and what is allowed."""

from collections.abc import Iterable
from typing import Any

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "full", "attention", "dots", "all_dots", "offload")
IMPLEMENTATIONS = ("auto", "dense", "packed", "kernel", "cudnn")
# Largest values of fields that have no limit of their own: what an int32 holds,
# and what float32 computes with.
MOST_COUNT = 2**31 - 1
MOST_NUMBER = 1e9
# Larger sizes are mistakes: they would be built until memory ends.
MOST_LAYERS = 1024
MOST_HEADS = 4096
MOST_WIDTH = 1 << 20  # columns of a layer
MOST_SIDE = 1 << 14  # rows or columns of an image
MOST_TOKENS = 1 << 24  # of a vocabulary or of a text
MOST_BATCH = 1 << 20
MOST_AHEAD = 1024  # threads, and batches prepared ahead
# Ways to bring images to the input of the network of FID.
RESIZES = ("tf1", "ptfid")


def at_least(
  section: str,
  low: float,
  values: Any,
  *names: str,
  most: float | None = None,
) -> None:
  """Raises ValueError unless fields are at least `low`, or None.

  Args:
    section: its name, for the message.
    low: smallest allowed value.
    values: the section, whose fields are checked, in tuples every item.
    *names: of the fields.
    most: largest allowed value; None is `MOST_COUNT` for integers and
      `MOST_NUMBER` for others.
  """
  for name in names:
    value = getattr(values, name)
    for part in value if isinstance(value, tuple) else (value,):
      if part is None:  # left to the data
        continue
      high = MOST_COUNT if isinstance(part, int) else MOST_NUMBER
      high = high if most is None else most
      if not part >= low:
        raise _error(section, name, value, f"at least {low}")
      if not part <= high:
        limit = "finite" if part == float("inf") else f"at most {high}"
        raise _error(section, name, value, limit)


def above(section: str, low: float, values: Any, *names: str) -> None:
  """Raises ValueError unless fields are finite and above `low`, or None."""
  for name in names:
    value = getattr(values, name)
    for part in value if isinstance(value, tuple) else (value,):
      if part is not None and not low < part <= MOST_NUMBER:
        allowed = f"above {low}, at most {MOST_NUMBER}"
        raise _error(section, name, value, allowed)


def at_most(section: str, most: float, values: Any, *names: str) -> None:
  """Raises ValueError unless fields are at most `most`, or None; see above."""
  in_range(section, -float("inf"), most, values, *names)


def in_range(
  section: str, low: float, high: float, values: Any, *names: str
) -> None:
  """Raises ValueError unless fields are in [low, high], or None.

  Args:
    section: its name, for the message.
    low: smallest allowed value.
    high: largest allowed value.
    values: the section, whose fields are checked, in tuples every item.
    *names: of the fields.
  """
  for name in names:
    value = getattr(values, name)
    for part in value if isinstance(value, tuple) else (value,):
      if part is not None and not low <= part <= high:
        low_only = low == -float("inf")
        allowed = f"at most {high}" if low_only else f"in [{low}, {high}]"
        raise _error(section, name, value, allowed)


def _error(section: str, name: str, value: Any, allowed: str) -> ValueError:
  return ValueError(f"{section}.{name}={shown(value)} must be {allowed}")


def shown(value: Any) -> str:
  """A value for a message, in a few words however long it is."""
  try:
    text = repr(value)
  except ValueError:  # an integer of more digits than Python writes
    text = "an integer of thousands of digits"
  return text if len(text) <= 200 else f"{text[:200]}..."


def one_of(section: str, values: Any, **allowed: Iterable[Any]) -> None:
  """Raises ValueError unless each field named holds one of the values given."""
  for name, choices in allowed.items():
    value = getattr(values, name)
    if value not in tuple(choices):
      raise ValueError(
        f"{section}.{name}={shown(value)} must be one of {tuple(choices)}"
      )
