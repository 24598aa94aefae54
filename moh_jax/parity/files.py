"""The files of a recorded case: meta.json and the arrays that it describes."""

import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from moh_jax.array_files import read_npz
from moh_jax.json_files import FileName, Shape, read_json

_MAX_ELEMENTS = 2**28  # of all tensors that a recipe makes


class _Array(msgspec.Struct):
  shape: Shape
  role: str = ""


_Atol = dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e6)]]


class _Tolerance(msgspec.Struct):
  outputs_atol: _Atol = {}
  grads_atol: _Atol = {}


class _Tensor(msgspec.Struct):
  name: str
  shape: Shape
  source: str
  offset: float | None = None
  scale: float | None = None
  sha256: str = ""


_Number = (
  Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | float | bool | str | None
)


class _Meta(msgspec.Struct):
  kind: str
  hyper_parameters: dict[str, _Number | dict | list[_Number]]
  arrays: dict[str, _Array]
  tolerance: _Tolerance
  files: dict[FileName, Any] | list[FileName]
  state_dict: list[_Tensor] = []


def read_meta(directory: pathlib.Path, kinds: Iterable[str]) -> dict[str, Any]:
  """Reads meta.json, and checks that the files it lists are there.

  Args:
    directory: of the case.
    kinds: that are known.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: meta.json is damaged or of an unknown kind.
  """
  file = directory / "meta.json"
  if not file.is_file():
    raise FileNotFoundError(
      f"{directory} is no recorded case: it has no meta.json"
    )
  meta = read_json(file, _Meta)
  if meta["kind"] not in kinds:
    raise ValueError(
      f"{file}: kind {meta['kind']!r} must be one of {tuple(kinds)}"
    )
  for name in meta["files"]:
    if not (directory / name).is_file():
      raise FileNotFoundError(f"{directory} has no {name}, meta.json lists it")
  entries = meta.get("state_dict", ())
  made = sum(math.prod(entry["shape"]) for entry in entries)
  if made > _MAX_ELEMENTS:
    raise ValueError(
      f"{file}: state_dict has {made:,} elements, must be at most "
      f"{_MAX_ELEMENTS:,}"
    )
  return meta


def read_arrays(
  directory: pathlib.Path, described: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Reads io.npz.

  Args:
    directory: of the case.
    described: the arrays by name, as meta.json says them.

  Raises:
    FileNotFoundError: there is no io.npz.
    ValueError: it is damaged, or not as meta.json says.
  """
  file = directory / "io.npz"
  arrays = read_npz(file)
  missing = [name for name in described if name not in arrays]
  if missing:
    raise ValueError(f"{file}: missing {missing}, which meta.json describes")
  for name, entry in described.items():
    if list(arrays[name].shape) != list(entry["shape"]):
      raise ValueError(
        f"{file}: {name} has shape {arrays[name].shape}, meta.json says "
        f"{tuple(entry['shape'])}"
      )
  return arrays
