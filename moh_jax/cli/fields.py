"""Options made from the fields of a dataclass, and options of several values.

Importable without JAX.
"""

import argparse
import dataclasses
import functools
import re
import typing
from typing import Any

from moh_jax.config import base, reference

_MOST = 2**32 - 1  # of whole numbers; seeds go that far


def add_fields(
  parser: argparse._ActionsContainer,
  cls: type,
  *names: str,
  defaults: str = "",
) -> None:
  """Adds an option for each field of a dataclass, described by its docstring.

  An option that is not given has no attribute, so that its default stands in
  the class alone; see `given_fields`.

  Args:
    parser: of the command.
    cls: dataclass whose docstring has a block `Attributes:`. Its `CHOICES`, if
      it has any, are the allowed values of items of tuples by field.
    *names: the fields; all if there are none.
    defaults: what the defaults are, if not those of the class: "the run's".
  """
  hints, meanings = base.hints(cls), reference.meanings(cls)
  for field in dataclasses.fields(cls):
    name, default = field.name, field.default
    if names and name not in names:
      continue
    text = meanings[name].removesuffix(".").replace("%", "%%")
    text = re.sub(r"[;,] None is ([^;]+)", r" (default: \1)", text)
    kind = base.plain(base.without_none(hints[name]))
    options: dict[str, Any] = {"type": integer if kind is int else kind}
    choices = base.choices(cls, name)
    choices = choices or getattr(cls, "CHOICES", {}).get(name)
    if kind is bool:
      options = {"action": "store_true"}
    elif item := typing.get_args(kind):
      kind = base.plain(item[0])
      parse = functools.partial(_parse_tuple, kind=kind)
      options = {"type": parse, "metavar": _ITEMS[kind][0]}
      text += f"; of {', '.join(choices)}" if choices else ""
    elif choices:
      options["choices"] = choices
    if isinstance(default, tuple):
      default = ",".join(map(str, default))
    if defaults or default not in (None, False, ""):
      text += f" (default: {defaults or default})"
    parser.add_argument(
      f"--{name.replace('_', '-')}",
      default=argparse.SUPPRESS,
      help=text,
      **options,
    )


def given_fields(
  args: argparse.Namespace, cls: type, *names: str
) -> dict[str, Any]:
  """Those of the fields that were given; arguments as for `add_fields`."""
  names = names or tuple(field.name for field in dataclasses.fields(cls))
  return {name: getattr(args, name) for name in names if hasattr(args, name)}


def integer(text: str) -> int:
  """Parses a whole number that 32 bits hold."""
  try:
    number = int(text)
  except ValueError:
    number = None
  if number is None or abs(number) > _MOST:
    raise argparse.ArgumentTypeError(
      f"{text[:30]!r} must be a whole number, at most {_MOST}"
    )
  return number


def share(text: str) -> float:
  """Parses a share, at least 0 and below 1."""
  try:
    number = float(text)
  except ValueError:
    number = -1.0
  if not 0 <= number < 1:
    raise argparse.ArgumentTypeError(
      f"{text[:30]!r} must be at least 0 and below 1"
    )
  return number


def int_tuple(text: str) -> tuple[int, ...]:
  """Parses "0,0,6,12"."""
  return _parse_tuple(text, int)


def _parse_tuple(text: str, kind: type) -> tuple:
  """Parses "50,62.5" or "dense,packed"."""
  try:
    values = tuple(kind(part) for part in text.split(","))
  except ValueError as error:
    _, what = _ITEMS[kind]
    raise argparse.ArgumentTypeError(
      f"{text!r} must be {what} separated by commas"
    ) from error
  if kind is int:
    for part in text.split(","):
      integer(part)  # within its range
  return values


# Type of a tuple's items -> metavar of an option of them, and their name.
_ITEMS = {
  int: ("N,...", "integers"),
  float: ("P,...", "percentages"),
  str: ("NAME,...", "names"),
}
