"""Config files: Python with `get_config`, and overrides of single keys."""

import copy
import inspect
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Sequence, Set
from typing import Any

from moh_jax.config.base import GivenText
from moh_jax.config.parse import from_config_dict, to_dict
from moh_jax.config.registry import ROUTERS, family_names
from moh_jax.config.run import Config

_REQUIRED = inspect.Parameter.empty


def override(cfg: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
  """Changes some keys of a config.

  Args:
    cfg: nested dicts of sections; they are changed.
    overrides: "section.field=VALUE", later ones win; for instance
      "optim.lr=3e-4", "model.top_k=(1,2)" or "data.path=some/where".

  Returns:
    The same dicts. New values are `GivenText`, which `from_config_dict` reads.

  Raises:
    ValueError: an override does not fit; the message names the key.
  """
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ValueError(f"override {text!r} must be FIELD=VALUE")
    _set(cfg, key, value)
  return cfg


def changed(config: Config, overrides: Sequence[str]) -> Config:
  """A run with some keys changed; arguments and errors as of `override`."""
  if not overrides:
    return config
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
  if path.suffix != ".py":
    raise ValueError(f"{path}: a config file is Python and ends in .py")
  folder = str(path.parent.resolve())
  before, registered = set(sys.modules), (family_names(), ROUTERS.names())
  sys.path.insert(0, folder)  # a module of the user's own may lie beside it
  try:
    content = runpy.run_path(str(path))
    if not callable(get_config := content.get("get_config")):
      raise ValueError(f"{path}: has no function get_config")
    parameters = [*inspect.signature(get_config).parameters.values()]
    if argument and not parameters:
      raise ValueError(f"{path}: takes no argument, {argument!r} was given")
    if not argument and parameters and parameters[0].default is _REQUIRED:
      raise ValueError(f"{path}: needs an argument, {path}:ARG")
    known = content.get("ARGUMENTS")
    if argument and known and argument.partition(":")[0] not in known:
      raise ValueError(f"{path}: {argument!r} must be one of {tuple(known)}")
    cfg = get_config(argument) if argument else get_config()
    cfg = copy.deepcopy(cfg.to_dict() if hasattr(cfg, "to_dict") else cfg)
  except (Exception, SystemExit) as error:  # the user's code may raise anything
    if str(error).startswith(f"{path}: "):
      raise
    raise ValueError(f"{path}{_line(error, path)}: {_said(error)}") from error
  finally:
    if folder in sys.path:  # the file may have taken it out
      sys.path.remove(folder)
    # Another config may have other modules of these names, or change what they
    # hold. Those that register a family or a router stay: it is in use.
    if registered == (family_names(), ROUTERS.names()):
      _forget(set(sys.modules) - before, before, folder)
  if not isinstance(cfg, dict):
    raise ValueError(
      f"{path}: get_config returned {type(cfg).__name__}, not a ConfigDict"
    )
  return cfg


def _forget(names: Set[str], known: Set[str], folder: str) -> None:
  """Drops modules that were found in a folder, but for parts of known ones."""
  for name in [
    name
    for name in names
    if (top := name.partition(".")[0]) not in known
    and _place(sys.modules[name]).startswith(os.path.join(folder, top))
  ]:
    del sys.modules[name]


def _place(module: Any) -> str:
  """Its file, or its folder where that has no __init__.py."""
  file = getattr(module, "__file__", None)
  return file or next(iter(getattr(module, "__path__", ())), "")


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
  section = cfg
  for part in path:
    section = section.setdefault(part, {})
    if not isinstance(section, dict):
      raise ValueError(f"unknown config key {key}")
  section[name] = GivenText(text)
