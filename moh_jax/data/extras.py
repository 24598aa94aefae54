"""Libraries that only some users need."""

import importlib
import types


def import_llm_extra(library: str, purpose: str) -> types.ModuleType:
  """Imports a library of the extra "llm".

  Args:
    library: its name.
    purpose: what needs it, for the message.

  Raises:
    ValueError: it is not installed.
  """
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{purpose} needs the library {library!r}: pip install 'moh_jax[llm]'"
    ) from error
