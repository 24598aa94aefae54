"""Libraries that only some users need."""

import importlib
import types


def import_extra(library: str, purpose: str, extra: str) -> types.ModuleType:
  """Imports a library that an extra installs.

  Args:
    library: its name, or that of a module of it.
    purpose: what needs it, for the message.
    extra: its name in pyproject.toml.

  Raises:
    ValueError: it is not installed.
  """
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{purpose} needs the library {library.partition('.')[0]!r}: pip install "
      f"'moh_jax[{extra}]'"
    ) from error


def import_llm_extra(library: str, purpose: str) -> types.ModuleType:
  """Imports a library of the extra "llm", see `import_extra`."""
  return import_extra(library, purpose, "llm")
