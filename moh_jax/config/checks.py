"""Range checks that name the field, its value and what is allowed."""

from collections.abc import Iterable
from typing import Any

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "full", "dots")
IMPLEMENTATIONS = ("auto", "dense", "packed", "kernel", "cudnn")


def at_least(section: str, low: float, **fields: float) -> None:
  """Raises ValueError unless every field is at least `low`."""
  for name, value in fields.items():
    if not value >= low:
      raise ValueError(f"{section}.{name}={value!r} must be at least {low}")
    if value == float("inf"):
      raise ValueError(f"{section}.{name}={value!r} must be finite")


def stated(**fields: Any) -> dict[str, Any]:
  """The fields that a section states; None leaves one to the data."""
  return {name: x for name, x in fields.items() if x is not None}


def in_range(section: str, low: float, high: float, **fields: float) -> None:
  """Raises ValueError unless every field is in [low, high]."""
  for name, value in fields.items():
    if not low <= value <= high:
      raise ValueError(f"{section}.{name}={value!r} must be in [{low}, {high}]")


def one_of(section: str, allowed: Iterable[Any], **fields: Any) -> None:
  """Raises ValueError unless every field is one of `allowed`."""
  allowed = tuple(allowed)
  for name, value in fields.items():
    if value not in allowed:
      raise ValueError(f"{section}.{name}={value!r} must be one of {allowed}")


def is_section(section: str, cls: type, **fields: Any) -> None:
  """Raises ValueError unless every field is a nested section of this class."""
  for name, value in fields.items():
    if not isinstance(value, cls):
      raise ValueError(f"{section}.{name}={value!r} must be a {cls.__name__}")


def check_runtime(model: Any) -> None:
  """Checks how a model section says to compute: what all families share."""
  one_of("model", DTYPES, dtype=model.dtype)
  one_of("model", REMATS, remat=model.remat)
  one_of("model", IMPLEMENTATIONS, attention_impl=model.attention_impl)
