"""The registry of all families of models, and what is looked up in it."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from moh_jax.config.family import Family
  from moh_jax.config.run import Config

# Entry point group in which installed packages name modules that call
# `register_family` when they are imported.
ENTRY_POINTS = "moh_jax.families"
_BUILT_IN = ("vit", "dit", "llm")

_registry: dict[str, Family] = {}


def register_family(family: Family) -> Family:
  """Makes a family known to configs, checkpoints and commands.

  Args:
    family: the record. Registering an equal class again replaces it.

  Returns:
    The same record.

  Raises:
    ValueError: another family has its name, or a required attribute is missing.
  """
  for attribute in ("name", "model"):
    if not hasattr(family, attribute):
      raise ValueError(f"{type(family).__name__}.{attribute} must be set")
  known = _registry.get(family.name)
  built_in = type(family).__module__.startswith("moh_jax.families.")
  taken = family.name in _BUILT_IN and not built_in
  if taken or (known and type(known).__qualname__ != type(family).__qualname__):
    raise ValueError(f"family name={family.name!r} is taken by another family")
  _registry[family.name] = family
  return family


def get_family(name: str) -> Family:
  """The record of a family.

  Raises:
    ValueError: there is no such family; the known ones are listed.
  """
  if isinstance(name, str) and name not in _registry:
    if name in _BUILT_IN:
      importlib.import_module(f"moh_jax.families.{name}")
    else:
      for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        point.load()
  if not isinstance(name, str) or name not in _registry:
    raise ValueError(
      f"model.family={name!r} must be one of {family_names()}; a family of "
      "another package must be imported first (--import MODULE)"
    )
  return _registry[name]


def family_names() -> tuple[str, ...]:
  """Names of the built-in families and of those registered so far."""
  return (*_BUILT_IN, *(name for name in _registry if name not in _BUILT_IN))


def families() -> tuple[Family, ...]:
  """All records, the built-in ones first."""
  return tuple(get_family(name) for name in family_names())


def check_command(config: Config, command: str, where: str) -> Family:
  """The record of a checkpoint's family, if a command works with it.

  Args:
    config: of the checkpoint.
    command: its name, such as "sample".
    where: the checkpoint, for the message.

  Raises:
    ValueError: the family does not have the command; those that do are listed.
  """
  family = get_family(config.model.family)
  if command not in family.commands:
    able = [other.name for other in families() if command in other.commands]
    raise ValueError(
      f"{where} holds a model of family {family.name!r}; `{command}` needs "
      f"{' or '.join(map(repr, able))}"
    )
  return family


def released_model(name: str) -> Any:
  """The model section of a released model.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  models = released_models()
  if name not in models:
    raise ValueError(f"model {name!r} must be one of {tuple(models)}")
  return models[name]


def released_models() -> Mapping[str, Any]:
  """All released models: name to model section."""
  return {
    name: model
    for family in families()
    for name, model in family.released().items()
  }


def public_formats() -> tuple[str, ...]:
  """Formats of public checkpoints that `convert` reads."""
  return tuple(kind for family in families() for kind in family.formats)


def export_forms() -> tuple[str, ...]:
  """Forms of the folders that `export` writes."""
  return tuple(form for family in families() for form in family.exports if form)


def family_of_format(kind: str) -> Family:
  """The family that reads a format.

  Raises:
    ValueError: none does; the known formats are listed.
  """
  for family in families():
    if kind in family.formats:
      return family
  raise ValueError(f"--from {kind!r} must be one of {public_formats()}")
