"""Checks of the paths that commands are given; importable without JAX."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.runtime.files import check_regular, check_writable

# Arguments of commands that name files or folders to read.
_INPUTS = (
  *("against", "images", "labels_file"),
  *("reference", "samples", "source", "start"),
)
# Further ones that name a file or folder.
_OTHERS = ("checkpoint", "config", "data", "out", "tokenizer", "workdir")
# Those that are written, before which everything else is computed.
_OUTPUTS = ("csv", "json", "out", "per_class", "plot", "save_stats", "workdir")


def check_named(given: Mapping[str, Any]) -> None:
  """Refuses empty names: to most functions "" is the current folder.

  Args:
    given: arguments of a command by name.

  Raises:
    ValueError: a name is empty.
  """
  for name in (*_INPUTS, *_OTHERS):
    if "" in _paths(given, name):
      raise ValueError(f"--{name} '' must name a file or folder")


def check_there(given: Mapping[str, Any]) -> None:
  """Checks that inputs are there, and that outputs can be written.

  Args:
    given: arguments of a command by name.

  Raises:
    FileNotFoundError: an input does not exist.
    OSError: an output cannot be written.
    ValueError: an input is a pipe or a device, which might block for ever.
  """
  for name in _INPUTS:
    for path in _paths(given, name):
      if "://" not in path and not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or folder")
      if "://" not in path and not os.path.isdir(path):
        check_regular(path)
  for name in _OUTPUTS:
    for path in _paths(given, name):
      if path not in ("", "-") and "://" not in path:
        check_writable(path, f"--{name.replace('_', '-')}")


def _paths(given: Mapping[str, Any], name: str) -> Sequence[str]:
  value = given.get(name)
  if isinstance(value, str):
    return [value]
  return value if isinstance(value, list) else []
