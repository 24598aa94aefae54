"""Config files, ConfigDict, JSON and dataclasses: a run in its forms."""

import copy
import dataclasses
import json
import pathlib
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.config.base import GivenText, differing, make_section, near
from moh_jax.config.run import Config, section_types


def to_config_dict(config: Config) -> Any:
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
  model = cfg.get("model")
  if not isinstance(model, Mapping):
    raise ValueError(f"config section model={model!r} must have fields")
  types = section_types(model.get("family"), cfg)
  made = {name: make_section(name, types[name], cfg[name]) for name in cfg}
  return Config(**made)


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
  both = ({section: dataclasses.asdict(x)} for x in (ours, theirs))
  return differing(*map(leaves, both))


def differing_keys(ours: Config, theirs: Config) -> list[str]:
  """The same of all sections of two runs of a family."""
  return differing(*(leaves(to_dict(run)) for run in (ours, theirs)))


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Every path and value of nested dicts."""
  found = {}
  for name, value in values.items():
    path, is_part = f"{prefix}{name}", isinstance(value, Mapping)
    found |= leaves(value, f"{path}.") if is_part else {path: value}
  return found


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  """The old values under the new ones, in nested sections too."""
  result = {**old, **new}
  for name, value in new.items():
    if isinstance(value, Mapping) and isinstance(old.get(name), Mapping):
      result[name] = merged(old[name], value)
  return result


def override(cfg: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
  """Changes some keys of a config.

  Args:
    cfg: nested dicts of sections; they are changed.
    overrides: "section.field=VALUE", later ones win; for instance
      "optim.lr=3e-4", "model.top_k=(1,2)" or "data.path=some/where".

  Returns:
    The same dicts. New values are `GivenText`, which `from_config_dict` reads.

  Raises:
    ValueError: an override does not fit; the message names the key. Whether
      there is such a field, `from_config_dict` checks with the rest.
  """
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ValueError(f"override {text!r} must be FIELD=VALUE")
    *path, name = key.split(".")
    if not path:
      raise ValueError(
        f"config key {key!r} must be SECTION.FIELD; sections: {sorted(cfg)}"
      )
    section = cfg
    for part in path:
      section = section.setdefault(part, {})
      if not isinstance(section, dict):
        raise ValueError(f"unknown config key {key}")
    section[name] = GivenText(value)
  return cfg


def changed(config: Config, overrides: Sequence[str]) -> Config:
  """A run with some keys changed; arguments and errors as of `override`."""
  return from_config_dict(override(to_dict(config), overrides))


def run_file(spec: str) -> dict[str, Any]:
  """Runs a config file.

  Args:
    spec: "FILE" or "FILE:ARG"; the file's `get_config(ARG)` returns a
      ConfigDict or a dict of sections. Its `ARGUMENTS`, where it has them, are
      the known ones, without what follows a colon.

  Returns:
    What it returned, as nested dicts; nothing is checked yet.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file fails; the message names it.
  """
  name, _, argument = spec.partition(":")
  path = pathlib.Path(name)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such config file")
  # A module of the user's own may lie beside it.
  folder = str(path.parent.resolve())
  sys.path.insert(0, folder)
  try:
    content = runpy.run_path(str(path))
    known = content.get("ARGUMENTS", ())
    if known and argument and argument.partition(":")[0] not in known:
      hint = near(argument, known)
      raise ValueError(f"{argument!r} must be one of {known}{hint}")
    if "get_config" not in content:
      raise ValueError("has no function get_config")
    cfg = content["get_config"](*[argument] * bool(argument))
    cfg = cfg.to_dict() if hasattr(cfg, "to_dict") else cfg
    if not isinstance(cfg, dict):
      raise ValueError(f"get_config returned {cfg!r}, must be a dict")
    return copy.deepcopy(cfg)
  except Exception as error:  # the user's code may raise anything
    raise ValueError(f"{spec.rstrip(':')}{_said(error, path)}") from error
  finally:
    sys.path.remove(folder)


def _said(error: BaseException, path: pathlib.Path) -> str:
  """Where in a config file an error arose, and what it says."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == str(path)]
  text = str(error)
  if isinstance(error, SyntaxError) and error.filename == str(path):
    text, lines = error.msg, [error.lineno]
  if not isinstance(error, ValueError | OSError):
    text = f"{type(error).__name__}: {text}"
  return f", line {lines[-1]}: {text}" if lines else f": {text}"
