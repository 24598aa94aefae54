"""The keys of a config, described from the dataclasses of its sections."""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from moh_jax.config import base
from moh_jax.config.run import Config

_WIDTH = 80


class Key(NamedTuple):
  """One leaf of a config.

  Attributes:
    name: "section.field", or "section.part.field" where sections nest.
    value: of the run that is described, or the default.
    type: as Python writes it.
    meaning: what the section's docstring says of it, and the choices where
      there are several.
  """

  name: str
  value: Any
  type: str
  meaning: str


def keys(name: str, section: Any) -> Iterator[Key]:
  """The leaves of a section, those of nested sections among them.

  Args:
    name: the section's.
    section: a dataclass instance whose docstring has a block `Attributes:`.
  """
  cls = type(section)
  described = meanings(cls)
  for field, hint in base.hints(cls).items():
    path, value = f"{name}.{field}", getattr(section, field)
    if dataclasses.is_dataclass(value):
      yield from keys(path, value)
    else:
      allowed, meaning = base.choices(cls, field), described.get(field, "")
      if len(allowed) > 1:
        meaning += f" One of {', '.join(map(repr, allowed))}."
      yield Key(path, value, _type_name(hint), meaning)


def sections(config: Config) -> dict[str, str]:
  """What each section of a run is, by name."""
  every = config.by_name().items()
  return {name: first_sentence(type(section)) for name, section in every}


def describe(config: Config, name: str) -> str:
  """The keys of a section with value, type, meaning and choices, as text.

  Raises:
    ValueError: there is no such section.
  """
  every = config.by_name()
  if name not in every:
    near = base.near(name, every)
    raise ValueError(f"--help {name!r}{near}; sections: {', '.join(every)}")
  lines = [f"{name}: {first_sentence(type(every[name]))}"]
  for key in keys(name, every[name]):
    lines.append(f"  --config.{key.name}={key.value!r}  ({key.type})")
    indents = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
    lines += textwrap.wrap(key.meaning, _WIDTH, **indents)
  return "\n".join(lines)


def first_sentence(cls: type) -> str:
  """The first line of a docstring."""
  return inspect.getdoc(cls).partition("\n")[0]


def meanings(cls: type) -> dict[str, str]:
  """Field -> its text in the blocks `Attributes:` of a class and its bases."""
  found: dict[str, str] = {}
  for part in reversed(cls.__mro__):
    text = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")[2]
    block = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)[0]
    for entry in re.split(r"^  (?=\w+: )", block, flags=re.MULTILINE)[1:]:
      name, _, meaning = entry.partition(": ")
      found[name] = " ".join(meaning.split())
  return found


def _type_name(hint: Any) -> str:
  """As Python writes it: "float", "tuple[int, ...]", "int | None"."""
  kind = base.without_none(hint)
  if kind is not hint:
    return f"{_type_name(kind)} | None"
  if items := typing.get_args(kind := base.plain(kind)):
    names = ("..." if item is ... else _type_name(item) for item in items)
    return f"tuple[{', '.join(names)}]"
  return kind.__name__
