"""Registries: families, routers and other kinds that packages can add, by name.

A record names code as "MODULE:NAME" or "MODULE", which is imported when it is
first used, so that configs load without JAX and no module here imports others.
The package registers its own families and routers in `moh_jax/__init__.py`, by
the calls that other packages make.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from moh_jax.config.base import near

Record = TypeVar("Record")


class Registry(Generic[Record]):
  """Records by their field `name`; `Annotated[str, registry]` types a field.

  Args:
    key: config key that holds the name, for messages.
    what: what a record describes, for messages.
    code: the field with a record's class or "MODULE:NAME", which tells it from
      others of its name.
  """

  def __init__(self, key: str, what: str, code: str):
    self.key, self.what, self.code = key, what, code
    self._records: dict[str, Record] = {}

  def add(self, record: Record) -> Record:
    """Adds a record, or replaces that of a class of the same name.

    Raises:
      ValueError: the name is that of another one.
    """
    known = self._records.get(record.name, record)
    if self._called(known) != self._called(record):
      raise ValueError(
        f"{self.what} name={record.name!r} is taken by another {self.what}"
      )
    self._records[record.name] = record
    return record

  def get(self, name: str) -> Record:
    """The record of a name.

    Raises:
      ValueError: there is none; the known names are listed.
    """
    if allowed := self.refusal(name):
      raise ValueError(f"{self.key}={name!r} must be {allowed}")
    return self._records[name]

  def refusal(self, name: Any) -> str:
    """What a name must be, or "" where there is a record of it."""
    if isinstance(name, str) and name in self._records:
      return ""
    return (
      f"one of {self.names()}{near(str(name), self.names())}; a {self.what} "
      "of another package must be imported first (--import MODULE)"
    )

  def names(self) -> tuple[str, ...]:
    """All names, in the order in which they were added."""
    return tuple(self._records)

  def records(self) -> tuple[Record, ...]:
    """All records, in the order in which they were added."""
    return tuple(self._records.values())

  def _called(self, record: Record) -> str:
    """Name of a class, also of one defined again; partials share theirs."""
    code = getattr(record, self.code)
    if isinstance(code, str):
      return code
    return getattr(code, "__qualname__", type(code).__qualname__)


def imported(part: Any) -> Any:
  """What a record names as "MODULE:NAME" or "MODULE"; other values as they are.

  Only a module that may import the named one calls this.
  """
  return pkgutil.resolve_name(part) if isinstance(part, str) else part


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models: its config section, its network and what trains it.

  Every field but the name, the commands and the forms may be "MODULE:NAME".

  Attributes:
    name: value of `model.family`.
    model: dataclass of the section `model`, a subclass of
      `config.RoutedLayers`. It says which other sections a run has.
    network: (model section) -> the Linen module, which maps the section's
      `example_inputs` to (output, ModelAux).
    task: what builds the training task and the evaluation, often a module; see
      `training.task.TaskBuilder`.
    converter: `convert.rules.Converter` of the public checkpoints; None
      where there are none.
    probe: (network, config) -> `evaluation.probe.Probe`, how `heads` runs the
      network; None where it cannot.
    released: released models, name to model section.
    commands: commands that work with this family but not with all: "classify",
      "generate", "sample".
    formats: formats that `convert` reads, each with the beginnings of the names
      of the released models that have it, and of their usual files, folders and
      values in config.json (in lower case, with - for _).
    exports: forms that `export` writes, the default first: "" is one file of
      tensors, the others are folders.
  """

  name: str
  model: type | str
  network: Callable[[Any], Any] | str
  task: Any
  converter: Any = None
  probe: Callable[..., Any] | str | None = None
  released: Mapping[str, Any] | str = dataclasses.field(default_factory=dict)
  commands: frozenset[str] = frozenset()
  formats: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  exports: tuple[str, ...] = ("",)


FAMILIES: Registry[Family] = Registry("model.family", "family", "model")


def register_family(family: Family) -> Family:
  """Makes a family known to configs, checkpoints and commands.

  Args:
    family: the record. Another one of the same model section replaces it.

  Raises:
    ValueError: the name is that of another family.
  """
  return FAMILIES.add(family)


def get_family(name: str) -> Family:
  """The record of a family.

  Raises:
    ValueError: there is no such family; the known ones are listed.
  """
  return FAMILIES.get(name)


def check_command(model: Any, command: str, where: str) -> Family:
  """The record of a checkpoint's family, if a command works with it.

  Args:
    model: section of the checkpoint's model.
    command: its name, such as "sample".
    where: the checkpoint, for the message.

  Raises:
    ValueError: the family does not have the command; those that do are listed.
  """
  family = get_family(model.family)
  if command not in family.commands:
    able = [f.name for f in FAMILIES.records() if command in f.commands]
    raise ValueError(
      f"{where} holds a model of family {family.name!r}; `{command}` needs "
      f"{' or '.join(map(repr, able))}"
    )
  return family


def released_model(name: str, **changes: Any) -> Any:
  """The model section of a released model.

  Args:
    name: such as "moh-vit-s80".
    **changes: fields with other values.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  models = released_models()
  if name not in models:
    raise ValueError(f"model {name!r} must be one of {tuple(models)}")
  return dataclasses.replace(models[name], **changes)


def released_models() -> dict[str, Any]:
  """All released models: name to model section."""
  return {
    name: model
    for family in FAMILIES.records()
    for name, model in imported(family.released).items()
  }


def public_formats() -> tuple[str, ...]:
  """Formats of public checkpoints that `convert` reads."""
  return tuple(kind for family in FAMILIES.records() for kind in family.formats)


def export_forms() -> tuple[str, ...]:
  """Forms of the folders that `export` writes."""
  forms = (form for f in FAMILIES.records() for form in f.exports)
  return tuple(filter(None, forms))


def family_of_format(kind: str) -> Family:
  """The family that reads a format.

  Raises:
    ValueError: none does; the known formats are listed.
  """
  for family in FAMILIES.records():
    if kind in family.formats:
      return family
  raise ValueError(f"--from {kind!r} must be one of {public_formats()}")


@dataclasses.dataclass(frozen=True)
class RouterKind:
  """What configs and layers must know of a kind of router.

  Attributes:
    name: value of `model.router.kind`.
    module: subclass of `moh_jax.Router`, or a function of the same arguments
      (budget, config and initializer) that makes one; may be "MODULE:NAME".
      None leaves every head on.
    reads_norms: whether it reads the norms of the queries. Families whose
      queries have unit length refuse it.
    reads_time: whether it reads the embedding of the diffusion step in place of
      tokens, and so chooses the same heads for all tokens of an example. Only
      families that have one take it.
    varies: whether a token may select more routed heads than its budget says.
      Attention then allows for all of them.
    straight_through: whether `RouterConfig.straight_through` says which heads'
      scores get a gradient from its gates.
    selects: whether tokens select heads. Else all are on, whatever the budget.
  """

  name: str
  module: Callable[..., Any] | str | None
  reads_norms: bool = False
  reads_time: bool = False
  varies: bool = False
  straight_through: bool = False
  selects: bool = True


ROUTERS: Registry[RouterKind] = Registry("router.kind", "router", "module")
get_router = ROUTERS.get


def register_router(
  name: str, module: Callable[..., Any] | str | None, **properties: bool
) -> RouterKind:
  """Makes a router known to configs, checkpoints and commands.

  Args:
    name: value of `model.router.kind`.
    module: subclass of `moh_jax.Router`, or a function of the same arguments
      that makes one, such as a `functools.partial` with further fields.
    **properties: `reads_norms`, `reads_time`, `varies` and `straight_through`,
      False unless given, and `selects`, True. `reads_norms`: the router needs
      the norms of the queries. `reads_time`: it reads the embedding [B, 1, C]
      of the diffusion step, not tokens. `varies`: a token may select more
      heads than the budget's `top_k`; to leave it out for such a router gives
      wrong outputs.
      `straight_through`: the gates obey `RouterConfig.straight_through`.
      `selects`: tokens select heads; without, all heads of a layer are shared.

  Returns:
    Its record. Registering a class of the same name again replaces it.

  Raises:
    ValueError: the name is that of another router.
  """
  return ROUTERS.add(RouterKind(name, module, **properties))


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
    pairs: whether examples are pairs of answers, for which adapters learn a
      preference (`tune.dpo`).
  """

  name: str
  source: Any
  holds: tuple[str, ...]
  has_path: bool = True
  options: tuple[str, ...] = ()
  pairs: bool = False


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
    **properties: `holds`, `has_path`, `options` and `pairs` of `SourceKind`;
      without `holds` the examples are images, or tokens.

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
