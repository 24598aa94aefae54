"""The sources of data, in which `data.source` is looked up."""

import dataclasses
from typing import Any

from moh_jax.config.base import shown
from moh_jax.config.registry import Registry

SPLITS = ("train", "val")


class MissingSplitError(FileNotFoundError):
  """Data have no such split, not even a part of it."""


@dataclasses.dataclass(frozen=True)
class SourceKind:
  """What configs and pipelines must know of a source of data.

  Attributes:
    name: value of `data.source`.
    source: class with the class methods `open` and `tell`, for images a
      subclass of `data.sources.ImageSource`, for text one with the methods of
      `data.sequences.PackedSource`; may be "MODULE:CLASS".
    holds: what examples may be: "images", "latents", "tokens".
    has_path: whether `data.path` names its directory.
    options: fields of the section `data` that only some sources read, this one
      among them.
  """

  name: str
  source: Any
  holds: tuple[str, ...]
  has_path: bool = True
  options: tuple[str, ...] = ()


# By what the section `data` reads: images (or latents), or text.
SOURCES: dict[str, Registry[SourceKind]] = {
  reads: Registry("data.source", "source", "source")
  for reads in ("images", "text")
}


def register_source(
  name: str, source: Any, *, reads: str = "images", **properties: Any
) -> SourceKind:
  """Makes a source of data known to configs and commands.

  Args:
    name: value of `data.source`.
    source: class with the class methods `open` and `tell`, or "MODULE:CLASS".
    reads: "images" or "text", the section `data` that it is for.
    **properties: `holds`, `has_path` and `options` of `SourceKind`; without
      `holds` the examples are images, or tokens.

  Returns:
    Its record. Registering a class of the same name again replaces it.

  Raises:
    ValueError: the name is that of another source.
  """
  holds = ("images",) if reads == "images" else ("tokens",)
  kind = SourceKind(name, source, **{"holds": holds, **properties})
  return SOURCES[reads].add(kind)


def get_source(data: Any) -> SourceKind:
  """The record of the source of a section `data`."""
  return SOURCES[data.reads].get(data.source)


def sources_with(data: Any, option: str) -> tuple[str, ...]:
  """Names of the sources that alone read a field of the section `data`."""
  kinds = SOURCES[data.reads].records()
  return tuple(kind.name for kind in kinds if option in kind.options)


def check_source(data: Any) -> None:
  """Checks the fields of a section `data` that depend on its source.

  Raises:
    ValueError: the path of the source is missing, or a field is set that it
      does not read.
  """
  if get_source(data).has_path and not data.path:
    raise ValueError(
      f"data.path='' must name the directory of data.source={data.source!r}"
    )
  for field in dataclasses.fields(data):
    value, readers = getattr(data, field.name), sources_with(data, field.name)
    if value != field.default and readers and data.source not in readers:
      raise ValueError(
        f"data.{field.name}={shown(value)} must be {field.default!r} with "
        f"data.source={data.source!r}; it is for {readers}"
      )
