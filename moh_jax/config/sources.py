"""The table of the sources of data, in which `data.source` is looked up."""

import dataclasses
import pkgutil
from typing import Any

from moh_jax.config.checks import one_of, shown

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
      `data.sequences.PackedSource`. "MODULE:CLASS" is imported when it is first
      used, since configs load without JAX.
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

  def load(self) -> Any:
    """The class of the source."""
    if isinstance(self.source, str):
      return pkgutil.resolve_name(self.source)
    return self.source


_IMAGES, _TOKENS = ("images",), ("tokens",)
# By what the section `data` reads: images (or latents), or text.
_BUILT_IN = {
  "images": (
    SourceKind(
      "digits", "moh_jax.data.sources:DigitsSource", _IMAGES, has_path=False
    ),
    SourceKind(
      "image_folder",
      "moh_jax.data.image_folders:ImageFolderSource",
      _IMAGES,
      options=("class_list", "decode"),
    ),
    SourceKind(
      "array_record",
      "moh_jax.data.image_shards:ArrayRecordSource",
      _IMAGES,
      options=("decode",),
    ),
    SourceKind(
      "parquet",
      "moh_jax.data.image_tables:ParquetSource",
      _IMAGES,
      options=("class_list", "label_column", "decode"),
    ),
    SourceKind("latents", "moh_jax.data.latents:LatentSource", ("latents",)),
    SourceKind(
      "fake",
      "moh_jax.data.sources:FakeSource",
      ("images", "latents"),
      has_path=False,
    ),
  ),
  "text": (
    SourceKind(
      "tokens",
      "moh_jax.data.sequences:PackedSource",
      _TOKENS,
      options=("mix", "ratios"),
    ),
    SourceKind("stdlib", "moh_jax.data.stdlib:StdlibSource", _TOKENS),
    SourceKind(
      "fake", "moh_jax.data.sequences:FakeSequences", _TOKENS, has_path=False
    ),
  ),
}
_registry = {
  reads: {kind.name: kind for kind in kinds}
  for reads, kinds in _BUILT_IN.items()
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
    Its record. Registering a name again replaces what was registered.

  Raises:
    ValueError: the name is that of a built-in source.
  """
  holds = {"images": _IMAGES, "text": _TOKENS}[reads]
  kind = SourceKind(name, source, **{"holds": holds, **properties})
  if _registry[reads].get(name) in _BUILT_IN[reads]:
    raise ValueError(f"source name={name!r} is taken by a built-in source")
  _registry[reads][name] = kind
  return kind


def get_source(data: Any) -> SourceKind:
  """The record of the source of a section `data`."""
  return _registry[data.reads][data.source]


def sources_with(data: Any, option: str) -> tuple[str, ...]:
  """Names of the sources that alone read a field of the section `data`."""
  kinds = _registry[data.reads].values()
  return tuple(kind.name for kind in kinds if option in kind.options)


def check_source(data: Any) -> None:
  """Checks the fields of a section `data` that depend on its source.

  Raises:
    ValueError: there is no such source, its path is missing, or a field is set
      that it does not read.
  """
  one_of("data", data, source=_registry[data.reads])
  kind = get_source(data)
  if kind.has_path and not data.path:
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
