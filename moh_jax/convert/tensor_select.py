"""Shared by readers of tensor files: dtypes, errors, finding the weights."""

import logging
import pathlib
from typing import Any

EXPECTED = (
  "a safetensors file, a directory or *.index.json of safetensors shards, or"
  " a zip checkpoint of torch.save (torch >= 1.6)"
)
_LOG = logging.getLogger(__name__)
_NESTS = ("ema", "model", "state_dict")  # entries that may hold the weights
_MAX_LISTED = 20  # keys named in an error

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
DTYPES = (  # that are read from torch files
  *(*_FLOATS, "complex64", "complex128", "bool"),
  *(f"float8_{kind}" for kind in _FLOAT8),
  *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)


def read_error(path: pathlib.Path, found: str) -> ValueError:
  """Makes an error that says what a file is and what was expected."""
  found = " ".join(found.split())  # on one line, whatever library raised it
  return ValueError(f"{path}: found {found}; expected {EXPECTED}")


def select_tensors(
  path: pathlib.Path, tree: object, key: str | None, leaf: type
) -> dict[str, Any]:
  """Finds the dict of tensors in a checkpoint.

  Where it could be several entries a message says which one it is.

  Args:
    path: path of the checkpoint, for messages.
    tree: content of the checkpoint.
    key: entry that holds the tensors; None takes the first of the usual ones
      that is there and not None, else the top level.
    leaf: class of the tensors.

  Raises:
    ValueError: that entry is no dict that holds tensors alone.
  """

  def problem(value):
    if not isinstance(value, dict) or not value:
      return "not a dict with entries"
    for k, v in value.items():
      if not isinstance(k, str) or not isinstance(v, leaf):
        return f"entry {k!r} is not a dense tensor under a text name"
    return None

  entries = tree if isinstance(tree, dict) else {}
  nests = [k for k in _NESTS if isinstance(entries.get(k), dict)]
  if key is not None:
    tried = {key: entries[key]} if key in entries else {}
  else:
    # An entry that is broken is no reason to take another one's weights.
    tried = {k: entries[k] for k in nests[:1]} or {"the top level": tree}
  problems = {name: problem(value) for name, value in tried.items()}
  for name in problems:
    if problems[name] is None:
      if key is None and len([k for k in _NESTS if k in entries]) > 1:
        _LOG.warning("%s: the weights of its entry %r are taken", path, name)
      return tried[name]
  reasons = "; ".join(f"{k}: {v}" for k, v in problems.items()) or "no entry"
  listed = ", ".join(repr(k) for k in list(entries)[:_MAX_LISTED])
  more = ", ..." if len(entries) > _MAX_LISTED else ""
  raise ValueError(
    f"{path}: found no dict of tensors for key={key!r} ({reasons}); expected"
    f" one, at the top or by a key among its {len(entries)}: [{listed}{more}]"
  )
