"""Imports of optional libraries, which pip installs as extras of moh_jax."""

import importlib
from typing import Any


def import_extra(library: str, purpose: str, extra: str = "llm") -> Any:
  """Imports an optional library, or says how to install it.

  Args:
    library: name of the module, such as "pyarrow.parquet".
    purpose: what needs the library, such as a file name, for the message.
    extra: name of the extra in pyproject.toml that installs it.

  Raises:
    ValueError: the library is not installed.
  """
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{purpose} needs the library {library.partition('.')[0]!r}: pip install "
      f"'moh_jax[{extra}]'"
    ) from error
