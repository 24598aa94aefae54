"""ConfigDict, JSON and dataclasses: the same run in three forms."""

import ast
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moh_jax.config.checks import shown
from moh_jax.config.legacy import MOVED
from moh_jax.config.run import Config, check_known, section_types

if TYPE_CHECKING:
  import ml_collections

_MOST_ITEMS = 1 << 16  # of a tuple
_BOOLS = {"true": True, "false": False}
# "(1,2)" and "[[0,1],[1,0]]", whose first bracket closes at the end.
_LISTED = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\[(?:[^][]|\[[^][]*\])*\]")
_NO_LITERAL = (ValueError, SyntaxError, MemoryError, RecursionError)


class GivenText(str):
  """The text of an override, which the type of its field says how to read."""


def to_config_dict(config: Config) -> "ml_collections.ConfigDict":
  """The run as a locked ConfigDict whose every leaf can be overridden."""
  # Models and kernels import this module where ml_collections may be missing.
  import ml_collections

  return ml_collections.ConfigDict(to_dict(config)).lock()


def from_config_dict(cfg: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict (or plain dict) and freezes it.

  Raises:
    ValueError: an unknown or missing key, a wrong type or a value out of range;
      the message names the field, its value and what is allowed.
  """
  cfg = cfg if isinstance(cfg, Mapping) else cfg.to_dict()
  if "model" not in cfg:
    raise ValueError("the config has no section 'model'")
  for name, section in cfg.items():
    if not isinstance(section, Mapping):
      raise ValueError(f"config section {name}={section!r} must have fields")
  family = cfg["model"].get("family")
  check_known(cfg, family)
  known = section_types(family)
  return Config(
    **{name: make_section(name, known[name], cfg[name]) for name in cfg}
  )


def to_dict(config: Config) -> dict[str, Any]:
  """The run as nested dicts of plain values."""
  return {
    name: dataclasses.asdict(section)
    for name, section in config.by_name().items()
  }


def to_json(config: Config) -> str:
  """The run as JSON; `from_config_dict` of the parsed text gives it back."""
  return json.dumps(to_dict(config), indent=2, sort_keys=True)


def apply_overrides(config: Config, section: str, **fields: Any) -> Config:
  """A copy with some fields of one section changed, checked again.

  Args:
    config: the run.
    section: which section.
    **fields: new values; of a nested section a dict of the fields that change,
      for instance `router={"gate_form": "paper"}` of the section "model".

  Raises:
    ValueError: an unknown field, a wrong type or a value out of range.
  """
  old = getattr(config, section)
  values = merged(dataclasses.asdict(old), fields)
  changed = make_section(section, type(old), values)
  return dataclasses.replace(config, **{section: changed})


def differing_fields(ours: Any, theirs: Any, section: str) -> list[str]:
  """Names what differs between two dataclasses of one section.

  Returns:
    Lines "section.field: OURS here, THEIRS there".
  """
  here, there = (
    dict(_leaves(section, dataclasses.asdict(values)))
    for values in (ours, theirs)
  )
  return [
    f"{path}: {here.get(path)!r} here, {there.get(path)!r} there"
    for path in sorted({*here, *there})
    if here.get(path) != there.get(path)
  ]


def unknown_key(path: str, known: Iterable[str] = ()) -> str:
  """The error of a config key that does not exist.

  Args:
    path: of the key, for instance "model.gate_form".
    known: keys that its section has.
  """
  if path in MOVED:
    return f"unknown config key {path}; it is now {MOVED[path]}"
  hint = f"; known: {sorted(known)}" if known else ""
  for close in difflib.get_close_matches(path.rpartition(".")[2], known, 1):
    hint = f"; did you mean {close!r}?{hint}"
  return f"unknown config key {path}{hint}"


def make_section(name: str, cls: type, values: Mapping[str, Any]) -> Any:
  """Builds a section; arguments and errors as for `read_fields`."""
  converted = read_fields(name, cls, values)
  try:
    return cls(**converted)
  except ValueError as error:
    # A nested section names its fields from itself on: "router.kind=...".
    parent = name.rpartition(".")[0]
    raise ValueError(f"{parent}.{error}" if parent else str(error)) from error


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
  if not isinstance(values, Mapping):
    raise ValueError(f"config section {name}={values!r} must have fields")
  hints = typing.get_type_hints(cls)
  fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
  for key in values:
    if key not in fields:
      raise ValueError(unknown_key(f"{name}.{key}", fields))
  return {
    key: _convert(f"{name}.{key}", value, fields[key])
    for key, value in values.items()
  }


def _convert(path: str, value: Any, hint: Any) -> Any:
  """Checks a leaf's type; lists (from JSON) become tuples, ints floats."""
  is_given = isinstance(value, GivenText)
  if isinstance(hint, types.UnionType):
    is_none = value is None or (is_given and value.lower() == "none")
    return None if is_none else _convert(path, value, without_none(hint))
  if is_given:
    value = _read(value, hint)
  if dataclasses.is_dataclass(hint):
    if isinstance(value, hint):
      return value
    if isinstance(value, Mapping):
      return make_section(path, hint, value)
    names = [field.name for field in dataclasses.fields(hint)]
    hint = f"; {value!r} looks like {MOVED[path]}" if path in MOVED else ""
    raise ValueError(
      f"{path}={value!r} must be a section with the fields {names}{hint}"
    )
  if isinstance(hint, types.GenericAlias):  # tuple[int, int], tuple[str, ...]
    if not isinstance(value, list | tuple) or len(value) > _MOST_ITEMS:
      raise ValueError(
        f"{path}={shown(value)} must be a {hint}, {_MOST_ITEMS} values at most"
      )
    item, *rest = typing.get_args(hint)
    length = None if rest == [...] else 1 + len(rest)
    if length is not None and len(value) != length:
      raise ValueError(f"{path}={value!r} must have {length} values")
    return tuple(
      _convert(f"{path}[{i}]", part, item) for i, part in enumerate(value)
    )
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    try:
      return float(value)
    except OverflowError:
      raise ValueError(f"{path}={shown(value)} must be finite") from None
  wrong_bool = isinstance(value, bool) and hint is not bool
  if wrong_bool or not isinstance(value, hint):
    raise ValueError(f"{path}={shown(value)} must be of type {hint.__name__}")
  return value


def _read(text: str, hint: Any) -> Any:
  """An override's text as a value; whether the type allows it is checked."""
  if hint is str:
    return str(text)
  if isinstance(hint, types.GenericAlias):
    text = text.strip()
    listed = text[1:-1] if _LISTED.fullmatch(text) else text
    return [GivenText(item) for item in split_items(listed)]
  try:
    value = _BOOLS.get(text.lower())
    return ast.literal_eval(text) if value is None else value
  except _NO_LITERAL:
    return str(text)


def split_items(text: str) -> list[str]:
  """The items of "1,2", "(1, 2),(3,)" or "*bias,'a,b'", each as text."""
  listed = re.sub(r"[\r\n]", " ", f"[{text}]")
  try:
    items, content = ast.parse(listed, mode="eval").body.elts, listed.encode()
  except (*_NO_LITERAL, AttributeError):  # such as "/a,/b" or "(*/a,*/b),*/c"
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]
  return [
    item.value
    if isinstance(item, ast.Constant) and isinstance(item.value, str)
    else content[item.col_offset : item.end_col_offset].decode()
    for item in items
  ]


def without_none(hint: Any) -> Any:
  """T of a hint `T | None`; any other hint as it is."""
  if not isinstance(hint, types.UnionType):
    return hint
  (kind,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
  return kind


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  """The old values under the new ones, in nested sections too."""
  result = {**old, **new}
  for name, value in new.items():
    if isinstance(value, Mapping) and isinstance(old.get(name), Mapping):
      result[name] = merged(old[name], value)
  return result


def _leaves(
  prefix: str, values: Mapping[str, Any]
) -> Iterable[tuple[str, Any]]:
  """Every path and value of nested dicts."""
  for name, value in values.items():
    path = f"{prefix}.{name}"
    if isinstance(value, Mapping):
      yield from _leaves(path, value)
    else:
      yield path, value
