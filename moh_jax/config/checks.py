"""Range checks that name the field, its value and what is allowed."""

from collections.abc import Iterable
from typing import Any

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "full", "dots")
IMPLEMENTATIONS = ("auto", "dense", "packed", "kernel", "cudnn")
# Ways to bring images to the input of the network of FID.
RESIZES = ("tf1", "ptfid")


def at_least(section: str, low: float, values: Any, *names: str) -> None:
  """Raises ValueError unless fields are at least `low` and finite, or None.

  Args:
    section: its name, for the message.
    low: smallest allowed value.
    values: the section, whose fields are checked.
    *names: of the fields.
  """
  for name in names:
    value = getattr(values, name)
    if value is None:  # left to the data
      continue
    if not value >= low:
      raise ValueError(f"{section}.{name}={value!r} must be at least {low}")
    if value == float("inf"):
      raise ValueError(f"{section}.{name}={value!r} must be finite")


def in_range(
  section: str, low: float, high: float, values: Any, *names: str
) -> None:
  """Raises ValueError unless fields of `values` are in [low, high]."""
  for name in names:
    value = getattr(values, name)
    if not low <= value <= high:
      raise ValueError(f"{section}.{name}={value!r} must be in [{low}, {high}]")


def one_of(section: str, values: Any, **allowed: Iterable[Any]) -> None:
  """Raises ValueError unless each field named holds one of the values given."""
  for name, choices in allowed.items():
    value = getattr(values, name)
    if value not in tuple(choices):
      raise ValueError(
        f"{section}.{name}={value!r} must be one of {tuple(choices)}"
      )
