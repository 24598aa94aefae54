"""Command-line flags of a dataclass, see `command`; importable without JAX."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Collection, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn, TypeVar

from moh_jax.config import base, reference
from moh_jax.config.base import GivenText

PREFIX = "--config."  # of options that change a key of a config
T = TypeVar("T")


def flag(name: str) -> str:
  """The flag of a field: "--top-k"; "from_" is "--from"."""
  return "--" + name.rstrip("_").replace("_", "-")


class Parser(argparse.ArgumentParser):
  """A parser whose errors are one line."""

  def error(self, message: str) -> NoReturn:
    """Ends the program with status 2; names what is near a wrong name."""
    if found := re.search(r"invalid choice: '(.+)' \(choose from", message):
      names = re.findall(r"[\w-]+", message[found.end() :])
      message += base.near(found[1], names)
    self.exit(2, f"error: {message}; see {self.prog} --help\n")


def make_parser(prog: str, cls: type, shared: Collection[str] = ()) -> Parser:
  """A parser of the options of a class.

  Args:
    prog: what its messages call the command.
    cls: dataclass whose docstring describes each field.
    shared: names of options that many commands have, shown last.
  """
  parser = Parser(
    prog=prog,
    description=inspect.getdoc(cls).partition("\n\nAttributes:")[0],
    allow_abbrev=False,
    add_help=False,
  )
  last = parser.add_argument_group("options that commands share")
  last.add_argument(
    "-h",
    "--help",
    action="help",
    help="show this; beside --config its sections, and --help SECTION the keys "
    "of one",
  )
  texts, own = reference.meanings(cls), inspect.get_annotations(cls)
  # Those that must be given come first, then those of the command itself.
  fields = sorted(
    dataclasses.fields(cls),
    key=lambda field: (field.default is not MISSING, field.name not in own),
  )
  for field in fields:
    how = field.metadata.get("how", "")
    if how != "hidden":
      group = last if field.name in shared else parser
      _add(group, cls, field, texts[field.name], how)
  return parser


def _add(
  group: Any, cls: type, field: dataclasses.Field, text: str, how: str
) -> None:
  """Adds the option of a field; one that is not given has no attribute."""
  hint = base.without_none(base.hints(cls)[field.name])
  is_tuple = typing.get_origin(hint) is tuple
  item = typing.get_args(hint)[0] if is_tuple else hint
  names = ",".join(map(str, base.choices(cls, field.name)))
  mark = getattr(item, "__metadata__", (None,))[0]
  by_type = {int: "N", float: "X", str: "NAME"}.get(base.plain(item), "VALUE")
  metavar = field.metadata.get("metavar") or getattr(mark, "METAVAR", by_type)
  shown = f"{{{names}}}" if names else metavar
  text, default = text.removesuffix(".").replace("%", "%%"), field.default
  # Switches are told apart by their type: False would equal a default of 0.
  if hint is not bool and default not in (None, "", (), MISSING):
    values = default if isinstance(default, tuple) else [default]
    text += f" (default: {','.join(map(str, values))})"
  settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
  if how == "positional":
    group.add_argument(
      field.name, nargs="+", metavar=field.name.upper(), **settings
    )
    return
  settings |= {"required": default is MISSING, "dest": field.name}
  if hint is bool:
    settings["action"] = "store_true"
  else:
    separated = ",..." if is_tuple and not how else ""
    settings["metavar"] = shown + separated
    settings |= _SEVERAL.get(how, {})
  group.add_argument(flag(field.name), **settings)


_SEVERAL = {"listed": {"nargs": "+"}, "repeated": {"action": "append"}}


def parse(parser: Parser, cls: type[T], argv: Sequence[str]) -> T:
  """Reads the options of a class; a wrong one ends the program with status 2.

  Args:
    parser: of `make_parser`.
    cls: the same class.
    argv: arguments, with changes of config keys: "--config.optim.lr=3e-4".
  """
  argv, changes = split_changes(argv)
  args, unknown = parser.parse_known_args(argv)
  if unknown:
    name = unknown[0].partition("=")[0]
    names = [x.name for x in dataclasses.fields(cls)]
    hint = base.near(name, [flag(x) for x in names])
    if name.startswith("--") and "." in name:
      hint = f"; a key of the config is changed by {PREFIX}KEY=VALUE"
    places = {"checkpoint", "config"}.intersection(names)
    if places and not name.startswith("-"):
      hint = f", did you mean {flag(min(places))} {name}?"
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
  hints = base.hints(cls)
  given = {name: _value(x, hints[name]) for name, x in vars(args).items()}
  try:
    return cls(**given, changes=changes)
  except ValueError as error:
    parser.error(str(error))


def _value(given: Any, hint: Any) -> Any:
  """An argument, or several, for the type of its field to read."""
  hint = base.without_none(hint)
  if isinstance(given, list):
    return [_value(text, typing.get_args(hint)[0]) for text in given]
  is_read = isinstance(given, bool) or base.plain(hint) is str
  return given if is_read else GivenText(given)


def split_changes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """The arguments of a command, and its changes of config keys: "a.b=v"."""
  others, changes = [], []
  for text in argv:
    is_change = text.startswith(PREFIX) and "=" in text
    (changes if is_change else others).append(text)
  return others, [text.removeprefix(PREFIX) for text in changes]
