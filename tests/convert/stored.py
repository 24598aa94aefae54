"""Safetensors files for tests."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def save_tensors(
  path: str | os.PathLike,
  tensors: Mapping[str, Any],
  metadata: dict[str, str] | None = None,
) -> None:
  """Writes arrays; the library would store a transposed view as it lies."""
  # Not np.ascontiguousarray, which turns a scalar into a vector.
  arrays = {n: np.asarray(x, order="C") for n, x in tensors.items()}
  save_file(arrays, path, metadata)
