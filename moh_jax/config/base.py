"""Sections: frozen dataclasses whose types say what their fields may hold.

A field's type is the only place that states its range or its choices:

  class OptimConfig(Section):
    name: Literal["adamw", "lion"] = "adamw"
    lr: Amount = 1e-3
    warmup_steps: Natural | None = None

`Section` checks every value by it, whether it comes from Python, JSON or a
command line. This module needs the standard library alone, since layers and
kernels read sections where nothing but JAX and Flax is installed.
"""

import ast
import dataclasses
import difflib
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn


class Range(NamedTuple):
  """The numbers that a field may hold; none is infinite.

  Attributes:
    low: smallest.
    high: largest.
    ends: which limits are allowed themselves: "[]", "[)", "(]" or "()".
  """

  low: float
  high: float = math.inf
  ends: str = "[]"

  def refusal(self, value: float) -> str:
    """What a value must be, or "" where it is allowed."""
    if not math.isfinite(value):
      return "finite"
    first, last = self.ends
    is_above = self.low < value or (first == "[" and value == self.low)
    is_below = value < self.high or (last == "]" and value == self.high)
    if is_above and is_below:
      return ""
    if self.high < math.inf:
      return f"in {first}{self.low}, {self.high}{last}"
    least = "at least" if first == "[" else "above"
    return f"{least} {self.low}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, ends="(]")]
Number = Annotated[float, Range(-math.inf)]
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, "()")]
Decay = Annotated[float, Range(0, 1, "[)")]
Dtype = Literal["float32", "bfloat16"]
DTYPES = typing.get_args(Dtype)


class Section:
  """A section of a config; subclasses are frozen dataclasses.

  Lists become tuples, integers floats, and dicts nested sections, as the types
  say.
  """

  # What messages about the section begin with; may be "".
  NAME: ClassVar[str] = "model"
  # Fields that may change when a run is continued.
  RUNTIME_FIELDS: ClassVar[tuple[str, ...]] = ()
  # Fields that must be equal where a run starts from trained parameters: with
  # other values these would compute something else.
  NUMERIC_FIELDS: ClassVar[tuple[str, ...]] = ()
  # Names of other packages for what a field says, with what to tell of it.
  OTHER_NAMES: ClassVar[Mapping[str, str]] = {}

  def __post_init__(self):
    for name, value in read_fields(self.NAME, type(self), vars(self)).items():
      object.__setattr__(self, name, value)
    self.check()

  def check(self) -> None:
    """Raises ValueError where fields do not fit together."""

  def fail(self, name: str, allowed: str) -> NoReturn:
    """Raises the ValueError of a field: its name, value and what is allowed."""
    path, value = _path(self.NAME, name), getattr(self, name)
    raise ValueError(f"{path}={value!r} {allowed}")


class GivenText(str):
  """The text of an override, which the type of its field says how to read."""


@functools.cache
def hints(cls: type) -> dict[str, Any]:
  """The fields of a dataclass with their types, ranges among them."""
  every = typing.get_type_hints(cls, include_extras=True)
  return {field.name: every[field.name] for field in dataclasses.fields(cls)}


def choices(cls: type, name: str) -> tuple[Any, ...]:
  """All allowed values of a field of a section, () where there is no list."""
  hint = without_none(hints(cls)[name])
  kind, *allowed = typing.get_args(hint) or (hint,)
  if typing.get_origin(hint) is Literal:
    return (kind, *allowed)
  names = getattr(allowed[0], "names", None) if allowed else None
  return names() if names else ()


def without_none(hint: Any) -> Any:
  """T of a type `T | None`; any other type as it is."""
  if typing.get_origin(hint) not in (types.UnionType, typing.Union):
    return hint
  (kind,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
  return kind


def plain(hint: Any) -> Any:
  """A type without the range of its numbers; choices are text."""
  if typing.get_origin(hint) is Annotated:
    return typing.get_args(hint)[0]
  return str if typing.get_origin(hint) is Literal else hint


def make_section(name: str, cls: type, values: Mapping[str, Any]) -> Any:
  """Builds a section; arguments and errors as for `read_fields`."""
  if not isinstance(values, Mapping) or values.keys() - hints(cls):
    read_fields(name, cls, values)  # raises
  try:
    return cls(**values)
  except ValueError as error:
    # A nested section names its fields from itself on: "router.kind=...".
    parent = name.rpartition(".")[0]
    raise ValueError(_path(parent, str(error))) from error


def read_fields(
  name: str, cls: type, values: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads fields of a section by the types that its dataclass declares.

  Args:
    name: path of the section, for errors.
    cls: its dataclass.
    values: some of its fields; lists and dicts stand for tuples and nested
      sections, `GivenText` for a value of any type.

  Raises:
    ValueError: an unknown key, a wrong type or a value out of range.
  """
  known, found = hints(cls), {}
  if not isinstance(values, Mapping):
    raise ValueError(
      f"{name}={values!r} must be a section with the fields {[*known]}"
    )
  for key, value in values.items():
    if key not in known:
      said = getattr(cls, "OTHER_NAMES", {}).get(key)
      hint = f"; {said}" if said else near(key, known)
      hint = f"{hint}; known: {sorted(known)}"
      raise ValueError(f"unknown config key {name}.{key}{hint}")
    found[key] = converted(_path(name, key), value, known[key])
  return found


def _path(parent: str, name: str) -> str:
  return f"{parent}.{name}" if parent else name


def near(name: str, known: Iterable[str]) -> str:
  """Text such as "; did you mean 'lr'?", empty if no known name is near."""
  close = difflib.get_close_matches(str(name), known, 1)
  return f"; did you mean {close[0]!r}?" if close else ""


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
  """Lines "NAME: OURS here, THEIRS there" of the entries that differ."""
  return [
    f"{name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
    for name in sorted({**ours, **theirs})
    if ours.get(name) != theirs.get(name)
  ]


def converted(path: str, value: Any, hint: Any) -> Any:
  """A value as its type wants it.

  Args:
    path: of the key or option, for errors.
    value: from Python, JSON or, as `GivenText`, a command line.
    hint: type of the field, see the module.

  Raises:
    ValueError: a wrong type or a value out of range.
  """
  if (kind := without_none(hint)) is not hint:
    is_none = isinstance(value, GivenText) and value.lower() == "none"
    return None if value is None or is_none else converted(path, value, kind)
  if isinstance(value, GivenText):
    value = _read(value, plain(hint))
  if dataclasses.is_dataclass(hint):
    return value if isinstance(value, hint) else make_section(path, hint, value)
  kind, *parts = typing.get_args(hint) or (hint,)
  origin, allowed = typing.get_origin(hint), ""
  if origin is tuple:
    return _tuple(path, value, kind, None if parts == [...] else 1 + len(parts))
  if origin is Literal:
    if value not in (kind, *parts):
      allowed = f"one of {(kind, *parts)}{near(str(value), (kind, *parts))}"
  else:
    value = _of_type(path, value, kind)
    allowed = parts[0].refusal(value) if parts else ""
  if allowed:
    raise ValueError(f"{path}={value!r} must be {allowed}")
  return value


def _of_type(path: str, value: Any, kind: type) -> Any:
  """A number, a bool or a text; integers become floats."""
  wider = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
  if not isinstance(value, wider) or (isinstance(value, bool) > (kind is bool)):
    raise ValueError(f"{path}={value!r} must be of type {kind.__name__}")
  return kind(value)


def _tuple(path: str, value: Any, item: Any, length: int | None) -> tuple:
  """Items of one type, so many of them where that is stated."""
  if not isinstance(value, list | tuple):
    raise ValueError(f"{path}={value!r} must be a tuple of values")
  if length and len(value) == 1:
    value = [*value] * length  # one side is a square
  if length not in (None, len(value)):
    raise ValueError(f"{path}={value!r} must have {length} values")
  return tuple(
    converted(f"{path}[{i}]", part, item) for i, part in enumerate(value)
  )


_BOOLS = {"true": "True", "false": "False"}


def _read(text: str, hint: Any) -> Any:
  """An override's text as a value; whether the type allows it is checked."""
  if hint is str:
    return str(text)
  if typing.get_origin(hint) is tuple:
    return split_items(text)
  try:
    return ast.literal_eval(_BOOLS.get(text.lower(), text))
  except (ValueError, SyntaxError):
    return str(text)


def split_items(text: str) -> Sequence[Any]:
  """The items of "1,2" and "(1, 2),(3,)" as values, of "*bias,b" as text."""
  try:
    found = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    text = text.strip()
    text = text[1:-1] if text[:1] + text[-1:] == "()" else text
    found = text.removesuffix(",").split(",") if text else ()
    return [GivenText(item.strip()) for item in found]
  return found if isinstance(found, tuple | list) else [GivenText(text)]
