"""Every key of a config, described from the dataclasses of its sections."""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from moh_jax.config import base
from moh_jax.config.registry import family_names
from moh_jax.config.run import Config, section_types

_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Key:
  """One leaf of a config.

  Attributes:
    name: "section.field", or "section.part.field" where sections nest.
    value: of the run that is described, or the default.
    type: as Python writes it.
    meaning: what the section's docstring says of it.
    choices: all allowed values, as Python writes them; empty where there is no
      such list.
  """

  name: str
  value: Any
  type: str
  meaning: str
  choices: tuple[str, ...]

  @property
  def text(self) -> str:
    """The meaning, and the choices where there are several."""
    if len(self.choices) < 2:
      return self.meaning
    return f"{self.meaning} One of {', '.join(self.choices)}.".strip()


def keys(name: str, section: Any) -> Iterator[Key]:
  """The leaves of a section, those of nested sections among them.

  Args:
    name: the section's.
    section: a dataclass instance whose docstring has a block `Attributes:`.
  """
  described = meanings(type(section))
  for field, hint in base.hints(type(section)).items():
    path, value = f"{name}.{field}", getattr(section, field)
    if dataclasses.is_dataclass(value):
      yield from keys(path, value)
    else:
      allowed = tuple(map(repr, base.choices(type(section), field)))
      meaning = described.get(field, "")
      yield Key(path, value, _type_name(hint), meaning, allowed)


def describe(config: Config) -> str:
  """Every key of a run with its value, type, meaning and choices, as text."""
  lines = ["config keys, each with its value in this config:"]
  for name, section in config.by_name().items():
    lines += ["", f"{name}: {_first_sentence(type(section))}"]
    for key in keys(name, section):
      lines.append(f"  --config.{key.name}={key.value!r}  ({key.type})")
      indents = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
      lines += textwrap.wrap(key.text, _WIDTH, **indents)
  return "\n".join(lines)


def markdown() -> str:
  """The sections of all families with their defaults, for the documentation."""
  families = {name: section_types(name) for name in family_names()}
  first, *others = families.values()
  shared = {
    name: cls
    for name, cls in first.items()
    if all(other.get(name) is cls for other in others)
  }
  parts = ["## Sections of every family"]
  parts += [_table(name, cls()) for name, cls in shared.items()]
  described = set(shared.values())
  for family, sections in families.items():
    parts.append(f"## Sections of `{family}`")
    for name, cls in sections.items():
      if cls not in described:
        parts.append(_table(name, cls()))
      elif name not in shared:  # such as the images of two families
        parts.append(f"### {name}\n\n`{cls.__name__}`, see above.")
      described.add(cls)
  return "\n\n".join(parts) + "\n"


def _table(name: str, section: Any) -> str:
  lines = [
    f"### {name}",
    "",
    f"`{type(section).__name__}`: {_first_sentence(type(section))}",
    "",
    "| key | default | type | meaning |",
    "|---|---|---|---|",
  ]
  for key in keys(name, section):
    cells = (f"`{key.name}`", f"`{key.value!r}`", f"`{key.type}`", key.text)
    lines.append(
      f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"
    )
  return "\n".join(lines)


def _first_sentence(cls: type) -> str:
  return inspect.getdoc(cls).partition("\n")[0]


def meanings(cls: type) -> dict[str, str]:
  """Field -> its text in the blocks `Attributes:` of a class and its bases."""
  found: dict[str, str] = {}
  for part in reversed(cls.__mro__):
    _, _, block = inspect.cleandoc(part.__doc__ or "").partition(
      "Attributes:\n"
    )
    name = None
    for line in block.splitlines():
      if line and not line.startswith(" "):
        break  # the next block
      if entry := re.fullmatch(r"  (\w+): (.*)", line):
        name = entry[1]
        found[name] = entry[2]
      elif name and line.strip():
        found[name] += " " + line.strip()
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
