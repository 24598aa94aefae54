"""Processes of one run compare what they are about to do, before they do it.

They use the key-value store of JAX's coordinator, which also works where their
programs would differ so much that a collective hangs.
"""

import itertools
import json
import platform
from collections.abc import Mapping
from typing import Any

import jax
from orbax.checkpoint import multihost

from moh_jax._version import __version__

# How long the slowest process may take to get here after the first.
_SECONDS = 120
_SHOWN = 5  # differences that the message names
_calls = itertools.count()  # keys of a finished call are not used again


def agree(values: Mapping[str, Any]) -> None:
  """Checks that all processes have the same values and versions.

  All of them must call it. With one process nothing is done.

  Args:
    values: nested mappings of JSON values, such as a config.

  Raises:
    ValueError: they differ; the message names what does, and is the same in all
      processes.
    OSError: a process has not come here in time.
  """
  count, index = jax.process_count(), jax.process_index()
  if count == 1:
    return
  client = multihost.get_jax_distributed_client()
  prefix = f"moh_jax/agree/{next(_calls)}"
  client.key_value_set(
    f"{prefix}/{index}", json.dumps(_flat({**_versions(), **values}))
  )

  def read(name: int | str, whose: int) -> str:
    try:
      return client.blocking_key_value_get(f"{prefix}/{name}", _SECONDS * 1000)
    except jax.errors.JaxRuntimeError as error:
      raise OSError(
        f"process {whose} of {count} did not say within {_SECONDS} s what it "
        f"runs: {' '.join(str(error).split())[:100]}"
      ) from error

  if index == 0:
    told = [json.loads(read(i, i)) for i in range(count)]
    client.key_value_set(f"{prefix}/verdict", _differences(told))
  if verdict := read("verdict", 0):
    raise ValueError(verdict)


def _versions() -> dict[str, str]:
  return {
    "version of moh_jax": __version__,
    "version of jax": jax.__version__,
    "version of Python": platform.python_version(),
  }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} as {"a.b": 1}."""
  flat = {}
  for name, value in values.items():
    if isinstance(value, Mapping):
      flat |= _flat(value, f"{prefix}{name}.")
    else:
      flat[f"{prefix}{name}"] = value
  return flat


def _differences(told: list[dict[str, Any]]) -> str:
  """How processes differ from the first one; empty if they do not."""
  first, found = told[0], []
  for index, values in enumerate(told):
    found += [
      f"{name}: {first.get(name)!r} in process 0, {values.get(name)!r} in "
      f"process {index}"
      for name in sorted(first.keys() | values.keys())
      if first.get(name) != values.get(name)
    ]
  if not found:
    return ""
  more = len(found) - _SHOWN
  rest = f"; and {more} more" if more > 0 else ""
  return (
    f"the {len(told)} processes of the run differ: "
    f"{'; '.join(found[:_SHOWN])}{rest}"
  )
