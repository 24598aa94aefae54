"""The config's sections and fields as text, from their dataclasses."""

import dataclasses
import inspect
import re

from moh_jax.config import families, parse

_ENTRY = re.compile(r"^  (\w+): (.*)$")


def section_fields(cls: type) -> list[tuple[str, str, object, str]]:
  """Name, type, default and meaning of every field of a section."""
  texts = _attributes(cls)
  return [
    (
      field.name,
      field.type if isinstance(field.type, str) else _type_name(field.type),
      field.default,
      texts.get(field.name, ""),
    )
    for field in dataclasses.fields(cls)
  ]


def markdown() -> str:
  """The page of all sections, as Markdown."""
  sections: dict[str, type] = {}
  for name, family in families.FAMILIES.items():
    sections[f"model ({name})"] = family.model
  for name, family in families.FAMILIES.items():
    kind = "text" if name == "llm" else "images"
    sections[f"data ({kind})"] = family.data
    sections.update(family.sections)
  sections.update(parse._SECTIONS)
  parts = []
  for name, cls in sections.items():
    parts += [f"## {name}", inspect.getdoc(cls).partition("\n")[0]]
    rows = [
      f"| `{name}` | `{kind}` | `{default!r}` | {_cell(text)} |"
      for name, kind, default, text in section_fields(cls)
    ]
    header = "| field | type | default | meaning |\n|---|---|---|---|"
    parts.append("\n".join([header, *rows]))
  return "\n\n".join(parts) + "\n"


def _type_name(kind: type) -> str:
  return str(kind) if "[" in str(kind) else kind.__name__


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("*", "\\*")


def _attributes(cls: type) -> dict[str, str]:
  """The entries of the docstring's block "Attributes:"."""
  texts: dict[str, str] = {}
  name = ""
  block = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
  for line in block.splitlines():
    if line and not line.startswith("  "):
      break
    if entry := _ENTRY.match(line):
      name = entry[1]
      texts[name] = entry[2]
    elif name and line.strip():
      texts[name] += " " + line.strip()
  return texts
