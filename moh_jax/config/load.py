"""Config files: Python with `get_config`, and overrides of single keys."""

import ast
import inspect
import pathlib
import runpy
import sys
import traceback
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.config.run import section_types

_BOOLS = {"true": True, "false": False}


def override(cfg: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
  """Changes some keys of a config.

  Args:
    cfg: nested dicts of sections; they are changed.
    overrides: "section.field=VALUE", later ones win; for instance
      "optim.lr=3e-4", "model.top_k=(1,2)" or "data.path=some/where".

  Returns:
    The same dicts.

  Raises:
    ValueError: an override does not fit; the message names the key.
  """
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ValueError(f"override {text!r} must be FIELD=VALUE")
    _set(cfg, key, value)
  return cfg


def run_file(spec: str) -> dict[str, Any]:
  """Runs a config file.

  Args:
    spec: "FILE" or "FILE:ARG"; the file's `get_config(ARG)` returns a
      ConfigDict or a dict of sections.

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
  if path.suffix != ".py":
    raise ValueError(f"{path}: a config file is Python and ends in .py")
  folder = str(path.parent.resolve())
  sys.path.insert(0, folder)  # a module of the user's own may lie beside it
  try:
    get_config = runpy.run_path(str(path)).get("get_config")
    if not callable(get_config):
      raise ValueError(f"{path}: has no function get_config")
    if argument and not inspect.signature(get_config).parameters:
      raise ValueError(f"{path}: takes no argument, {argument!r} was given")
    cfg = get_config(argument) if argument else get_config()
  except (Exception, SystemExit) as error:  # the user's code may raise anything
    if str(error).startswith(f"{path}: "):
      raise
    raise ValueError(f"{path}{_line(error, path)}: {_said(error)}") from error
  finally:
    sys.path.remove(folder)
  if hasattr(cfg, "to_dict"):
    cfg = cfg.to_dict()
  if not isinstance(cfg, dict):
    raise ValueError(
      f"{path}: get_config returned {type(cfg).__name__}, not a ConfigDict"
    )
  return cfg


def _line(error: BaseException, path: pathlib.Path) -> str:
  """Where in a config file an error arose: ", line 3", or ""."""
  if isinstance(error, SyntaxError) and error.filename == str(path):
    return f", line {error.lineno}"
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == str(path)]
  return f", line {lines[-1]}" if lines else ""


def _said(error: BaseException) -> str:
  """What an error says; ours need no name of a class."""
  text = error.msg if isinstance(error, SyntaxError) else str(error)
  is_plain = isinstance(error, ValueError | OSError) and text
  return text if is_plain else f"{type(error).__name__}: {text}"


def _set(cfg: dict[str, Any], key: str, text: str) -> None:
  """Changes one leaf; whether there is such a key is checked with the rest."""
  *path, name = key.split(".")
  if not path:
    raise ValueError(
      f"config key {key!r} must be SECTION.FIELD; sections: {sorted(cfg)}"
    )
  is_text = _is_text(cfg, key)
  section = cfg
  for part in path:
    section = section.setdefault(part, {})
    if not isinstance(section, dict):
      raise ValueError(f"unknown config key {key}")
  section[name] = text if is_text else _parse(text, section.get(name))


def _is_text(cfg: Mapping[str, Any], key: str) -> bool:
  """Whether a field is declared as text, whether or not the file states it."""
  section, _, name = key.partition(".")
  model = cfg.get("model")
  try:
    kinds = section_types(model["family"])
  except (KeyError, TypeError, ValueError):  # reported with the rest
    return False
  hints = typing.get_type_hints(kinds[section]) if section in kinds else {}
  return hints.get(name) is str


def _parse(text: str, old: Any) -> Any:
  """Reads a value as what it replaces: text as it is, "1,2" as a tuple."""
  if isinstance(old, str):
    return text
  try:
    value = _BOOLS.get(text.lower(), None)
    value = ast.literal_eval(text) if value is None else value
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    value = tuple(text.split(",")) if isinstance(old, tuple | list) else text
  if isinstance(old, tuple | list) and not isinstance(value, tuple | list):
    value = (value,)
  return value
