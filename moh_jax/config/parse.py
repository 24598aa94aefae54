"""ConfigDict, JSON and dataclasses: the same run in three forms."""

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from moh_jax.config.base import MOVED, make_section
from moh_jax.config.run import Config, check_known, section_types


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


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  """The old values under the new ones, in nested sections too."""
  result = {**old, **new}
  for name, value in new.items():
    if isinstance(value, Mapping) and isinstance(old.get(name), Mapping):
      result[name] = merged(old[name], value)
  return result


def upgrade(stored: Mapping[str, Any]) -> dict[str, Any]:
  """A stored config with every value under its present key.

  Checkpoints keep their config as JSON. Those written when the router, RoPE and
  the classifier's targets had no sections of their own are read through this;
  config files and command lines with an old key get an error that names the new
  one.

  Args:
    stored: sections of a run as a checkpoint holds them, of this version or an
      older one.
  """
  sections = copy.deepcopy(dict(stored))
  for old, new in MOVED.items():
    section, name = old.split(".")
    value = sections.get(section, {}).get(name)
    if value is None or isinstance(value, Mapping):
      continue
    del sections[section][name]
    *path, name = new.split(".")
    place = sections
    for part in path:
      place = place.setdefault(part, {})
      if not isinstance(place, dict):
        raise ValueError(f"{section}.{part}={place!r} must be a section")
    place[name] = value
  data = sections.get("data", {})
  if data.get("decode") == "reduced":
    # Now a part of "fast". Such a run cannot go on, since its stream is another
    # one, but its evaluation always decoded as "exact".
    data["decode"] = "exact"
  # Other families' runs held the classifier's fields too, and did not use them.
  family = sections.get("model", {}).get("family")
  if family is not None and "classifier" not in section_types(family):
    sections.pop("classifier", None)
  return sections


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
